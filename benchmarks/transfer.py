"""The best learning rate as a function of width and depth, with and without `model.base_width` and `model.base_depth`.

    OMP_NUM_THREADS=1 python benchmarks/transfer.py --optimizer muon --scaling on --widths 64 128 256 512
    OMP_NUM_THREADS=1 python benchmarks/transfer.py --optimizer adamw --scaling off --depths 2 4 8 16

Each run trains on characters of the standard library's sources: block 64, batch 12, the same samples in the same order, warmup
and a cosine to zero, bf16-mixed. All rates of the optimizer are multiplied by one factor, a power of two, or of √2 with
`--spacing 0.5`. The optimum is the lowest point of a parabola through the best factor and its neighbours, on a logarithmic
axis. Each finished run is a line of the CSV file, and is not repeated. `--table` prints a table of the file's runs.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.callbacks.learning_rate_schedules import wsd
from lit_llm.data import Characters, PythonStdlib
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossSums
from lit_llm.optim import MuonAdamW, optimizer_of

BASE_WIDTH, BASE_DEPTH, HEAD_DIM = 128, 4, 32
BLOCK, BATCH = 64, 12
RATES = {"muon": 0.01, "adamw": 0.002}
"""{optimizer: learning rate for a factor of 1}: MuonAdamW's default for both rates; for AdamW about the best at base size."""


class Run(NamedTuple):
    """All settings on which a run's result depends."""

    optimizer: str
    scaling: str
    width: int
    depth: int
    steps: int
    seed: int
    exponent: float
    """log2 of the factor by which the learning rates are multiplied."""


def batches(steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return token ids of (training (steps, BATCH, BLOCK + 1), validation (batches, rows, BLOCK + 1)). `seed`: of the order."""
    data = PythonStdlib(tokenizer=Characters(vocab_size=128), micro_batch_size=BATCH, global_batch_size=BATCH, block_size=BLOCK)
    data.prepare_data()
    data.setup("fit")
    rows = []
    for loader, count in ((data.train_dataloader(), steps), (data.val_dataloader(), 64)):
        found = []
        for batch in loader:
            found.append(torch.cat([batch["input_ids"], batch["targets"][:, -1:]], dim=1))
            if len(found) == count:
                break
        rows.append(torch.stack(found))
    order = torch.randperm(steps, generator=torch.Generator().manual_seed(seed))
    return rows[0][order], rows[1]


def make_optimizer(name: str, factor: float, groups: list) -> torch.optim.Optimizer:
    rate = RATES[name] * factor
    if name == "muon":
        return MuonAdamW(groups, lr=rate, adamw_lr=rate, ns_dtype="bfloat16")
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train(run: Run, data: tuple[Tensor, Tensor]) -> float:
    """Train the model of `run` on `data`, the result of `batches`. Return the validation loss in nats per character."""
    torch.manual_seed(run.seed)
    bases = {"base_width": BASE_WIDTH, "base_depth": BASE_DEPTH} if run.scaling == "on" else {}
    config = GPTConfig(
        n_layer=run.depth, n_embd=run.width, n_head=run.width // HEAD_DIM, block_size=BLOCK, vocab_size=128, **bases
    )
    model = GPT(config)
    optimizer = optimizer_of(model, lambda groups: make_optimizer(run.optimizer, 2**run.exponent, groups))
    peaks = [group["lr"] for group in optimizer.param_groups]
    train_rows, val_rows = data
    for step in range(1, run.steps + 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = wsd(step, peak=peak, final=0.0, warmup_steps=20, total_steps=run.steps, shape="cosine")
        rows = train_rows[step - 1]
        with torch.autocast("cpu", torch.bfloat16):
            sums = model(rows[:, :-1], rows[:, 1:])
        assert isinstance(sums, LossSums)
        optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    nll = count = 0.0
    with torch.no_grad():
        for rows in val_rows:
            sums = model(rows[:, :-1], rows[:, 1:])
            nll, count = nll + float(sums.nll), count + float(sums.count)
    return nll / count


class Results:
    """The losses of finished runs ({run: loss}), stored in the CSV file `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, {}
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    numbers = {name: int(row[name]) for name in ("width", "depth", "steps", "seed")}
                    run = Run(row["optimizer"], row["scaling"], **numbers, exponent=float(row["exponent"]))
                    self.losses[run] = float(row["loss"])

    def add(self, run: Run, loss: float) -> None:
        self.losses[run] = loss
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow([*Run._fields, "loss"])
            writer.writerow([*run, f"{loss:.5f}"])


def optimum(losses: dict[float, float]) -> float | None:
    """Return the exponent at the lowest point of the parabola through the best exponent and its neighbours.

    None: the best exponent is at an end of the grid. `losses`: {exponent: loss}."""
    at = sorted(losses)
    best = min(at, key=lambda exponent: losses[exponent])
    i = at.index(best)
    if i in (0, len(at) - 1):
        return None
    (x0, x1, x2), (y0, y1, y2) = at[i - 1 : i + 2], (losses[x] for x in at[i - 1 : i + 2])
    slope0, slope1 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (slope1 - slope0) / (x2 - x0)
    return (x0 + x1) / 2 - slope0 / (2 * curvature) if curvature > 0 else best


def search(base: Run, results: Results, data: tuple[Tensor, Tensor], spacing: float, start: float, wide: int) -> float:
    """Train runs with exponents around `start` until the best exponent has `wide` neighbours on both sides. Return the best."""
    wanted = [round(start / spacing) * spacing]
    while wanted:
        for exponent in wanted:
            run = base._replace(exponent=exponent)
            if run not in results.losses:
                loss = train(run, data)
                results.add(run, loss if math.isfinite(loss) else 99.0)
                print(*run, f"{results.losses[run]:.4f}", flush=True)
        known = {run.exponent: loss for run, loss in results.losses.items() if run._replace(exponent=0) == base}
        best = min(known, key=lambda exponent: known[exponent])
        near = [best + spacing * i for i in range(-wide, wide + 1)]
        wanted = [exponent for exponent in near if exponent not in known]
    return best


def table(results: Results) -> str:
    """Return text with a line for each model (best rate, lowest loss), and lines on how far the best rate moves over sizes."""
    curves: dict[tuple, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run, loss in results.losses.items():
        curves[run.optimizer, run.scaling, run.steps, run.width, run.depth][run.exponent][run.seed] = loss
    lines = ["optimizer scaling steps width depth  best rate / base's  lowest loss"]
    optima: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, points in sorted(curves.items()):
        name, scaling, steps, width, depth = key
        seeds = max(len(each) for each in points.values())
        mean = {x: sum(each.values()) / len(each) for x, each in points.items() if len(each) == seeds}
        at = optimum(mean)
        shown = "not bracketed" if at is None else f"{2**at:.3f}"
        lines.append(f"{name:9} {scaling:7} {steps:5} {width:5} {depth:5}  {shown:>19}  {min(mean.values()):11.4f}")
        if at is not None:
            if depth == BASE_DEPTH:
                optima[name, scaling, steps]["width"].append(at)
            if width == BASE_WIDTH:
                optima[name, scaling, steps]["depth"].append(at)
    for (name, scaling, steps), axes in sorted(optima.items()):
        for axis, found in axes.items():
            if len(found) > 1:
                ratio = 2 ** (max(found) - min(found))
                lines.append(
                    f"{name}, scaling {scaling}, {steps} steps: over {len(found)} {axis}s the best rate moves by {ratio:.2f}"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=RATES, default="muon")
    parser.add_argument("--scaling", choices=("on", "off"), default="on")
    parser.add_argument("--widths", type=int, nargs="*", default=[])
    parser.add_argument("--depths", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--spacing", type=float, default=1.0, help="of log2(rate)")
    parser.add_argument("--start", type=float, default=0.0, help="log2 of the first factor")
    parser.add_argument("--wide", type=int, default=1, help="neighbours on both sides of the best")
    parser.add_argument("--csv", type=Path, default=Path("runs/transfer.csv"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.csv)
    sizes = [(width, BASE_DEPTH) for width in options.widths] + [(BASE_WIDTH, depth) for depth in options.depths]
    for seed in options.seeds if sizes else []:
        data = batches(options.steps, seed)
        start = options.start
        for width, depth in sizes:
            base = Run(options.optimizer, options.scaling, width, depth, options.steps, seed, 0.0)
            start = search(base, results, data, options.spacing, start, options.wide)
    if options.table or not sizes:
        print(table(results))


if __name__ == "__main__":
    main()
