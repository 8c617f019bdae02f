"""Losses and norms of 20 steps under every strategy and precision on 2 and 4 processes, against one process.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py [--steps 20]

The model is the tests' tiny one (tests/distributed/layouts.py): 2 layers, 4 heads, width 32, MuonAdamW with clipping, gloo on a
CPU. Prints, for each cell, the greatest relative difference of any step's loss and of any step's gradient norm from the same
precision on one process; and for each precision what it is away from fp32.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

DISTRIBUTED = Path(__file__).parents[1] / "tests" / "distributed"
sys.path.insert(0, str(DISTRIBUTED))
import layouts  # noqa: E402
from launch import run_ranks  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    common = {"optimizer": "MuonAdamW", "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(layouts.TEXT)
        alone = {p: layouts.train(folder, precision=p, **common) for p in PRECISIONS}
        print(f"{'one process':24s}", "loss from fp32's")
        for p in PRECISIONS:
            print(f"{p:24s} {worst(alone[p]['train/loss'], alone['32-true']['train/loss']):8.1e}")
        print(f"\n{'processes, strategy':24s}", *(f"{p:>20s}" for p in PRECISIONS), "   (loss, norm)")
        for ranks, strategies in STRATEGIES.items():
            for strategy, arguments in strategies.items():
                jobs = {p: {"strategy": arguments, "precision": p, **common} for p in PRECISIONS}
                (folder / "jobs.json").write_text(json.dumps(jobs))
                cells = run_ranks(DISTRIBUTED / "layouts.py", ranks, folder, folder / "jobs.json", timeout=900)[0]
                row = [
                    "{:.1e}, {:.1e}".format(*(worst(cells[p][key], alone[p][key]) for key in ("train/loss", "grad/norm")))
                    for p in PRECISIONS
                ]
                print(f"{f'{ranks}, {strategy}':24s}", *(f"{cell:>20s}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
