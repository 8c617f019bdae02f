"""Losses and gradient norms of every strategy and precision on 2 and 4 processes, and of runs that change layout on resume.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py [--steps 20]
    OMP_NUM_THREADS=1 python benchmarks/layouts.py cross [--steps 20]

The model is the tests' (tests/distributed/layouts.py): 2 layers, 4 heads, width 32, MuonAdamW with clipping, gloo on a CPU. The
first command prints, for each strategy and precision, the largest relative difference over the steps of the loss and of the
gradient norm from one process with the same precision, and for each precision the largest difference of one process from fp32,
for both dtypes of Muon's iteration.

`cross` prints, for each layout that saves after half of the steps (rows) and each layout that continues (columns), the largest
relative difference of a continued step's loss on any rank from an uninterrupted run of the first layout. 0 means bit for bit.
All runs use fp32. The result is the worst of whole and sharded checkpoints, half of these saved asynchronously.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

DISTRIBUTED = Path(__file__).parents[1] / "tests" / "distributed"
sys.path[:0] = [str(DISTRIBUTED), str(DISTRIBUTED.parent)]
import cross_load  # noqa: E402
import layouts  # noqa: E402

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
STRATEGIES: dict[int, dict[str, object]] = {
    2: {"ddp": "ddp", "fsdp2": {"shard": 2}, "tp": {"shard": 1, "tensor_parallel": 2}},
    4: {
        "ddp": "ddp",
        "fsdp2": {"shard": 4},
        "hsdp 2×2": {"replicate": 2, "shard": 2},
        "tp": {"shard": 1, "tensor_parallel": 4},
        "fsdp2-tp 2×2": {"shard": 2, "tensor_parallel": 2},
    },
}


def worst(ours: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def strategies(folder: Path, steps: int) -> None:
    """Print the losses and gradient norms of every strategy and precision compared with one process."""
    for optimizer in ("MuonAdamW", "MuonAdamW-bfloat16"):
        print(f"\n{optimizer}")
        strategies_with(folder, {"optimizer": optimizer, "steps": steps})


def strategies_with(folder: Path, common: dict[str, Any]) -> None:
    alone = {p: layouts.train(folder, precision=p, **common) for p in PRECISIONS}
    print(f"{'one process':24s}", "loss, difference from fp32")
    for p in PRECISIONS:
        print(f"{p:24s} {worst(alone[p]['train/loss'], alone['32-true']['train/loss']):8.1e}")
    print(f"\n{'processes, strategy':24s}", *(f"{p:>20s}" for p in PRECISIONS), "   (loss, norm)")
    for ranks, of in STRATEGIES.items():
        for strategy, arguments in of.items():
            jobs = {p: {"strategy": arguments, "precision": p, **common} for p in PRECISIONS}
            cells = cross_load.run(folder, ranks, jobs, timeout=900)[0]
            row = [
                "{:.1e}, {:.1e}".format(*(worst(cells[p][key], alone[p][key]) for key in ("train/loss", "grad/norm")))
                for p in PRECISIONS
            ]
            print(f"{f'{ranks}, {strategy}':24s}", *(f"{cell:>20s}" for cell in row), flush=True)


def cross(folder: Path, steps: int) -> None:
    """Continue every layout's checkpoint of half of the steps in every layout, and compare with the uninterrupted runs."""
    at = steps // 2
    saved = cross_load.save_all(folder, at)
    straight = {"single": layouts.train(folder, steps=steps, **cross_load.COMMON)}
    moved = {}  # {"source → layout": results by rank}
    for source, place in saved.items():
        resume = cross_load.checkpoint(place, at)
        moved[f"{source} → single"] = [layouts.train(folder, steps=steps, resume=resume, **cross_load.COMMON)]
    for ranks, of in cross_load.LAYOUTS.items():
        jobs = {name: {"strategy": strategy, "steps": steps} for name, strategy in of.items()}
        results = cross_load.run(folder, ranks, jobs | cross_load.moves(saved, at, ranks, steps), timeout=900)
        straight |= {name: results[0][name] for name in of}
        moved |= {name: [result[name] for result in results] for name in results[0].keys() - of.keys()}
    print(f"{'from, to':24s}", *(f"{to:>12s}" for to in straight))
    for layout, alone in straight.items():
        ways = [name for name in saved if name.split(",")[0] == layout]
        row = [
            max(worst(rank["train/loss"], alone["train/loss"][at:]) for way in ways for rank in moved[f"{way} → {to}"])
            for to in straight
        ]
        print(f"{layout:24s}", *(f"{cell:12.1e}" if cell else f"{0:12d}" for cell in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "table", nargs="?", choices=(tables := {"strategies": strategies, "cross": cross}), default="strategies"
    )
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(layouts.TEXT)
        tables[chosen.table](folder, chosen.steps)


if __name__ == "__main__":
    main()
