"""A ladder of techniques: the effect of each technique, alone or combined with others, on the held-out loss of a small model.

A run trains a model of one size on one text for a fixed number of tokens. Its seed determines the initial weights and the order
of the data. Each finished run is a row of a CSV file and is not repeated, so an interrupted ladder continues. `--table` prints
a Markdown table of the rows. A technique is a change of the baseline, a model with lit_llm's defaults (`ladder_techniques.py`);
the techniques are in `ladder_model.py` and `ladder_optim.py`.

The training loop uses lit_llm's model, loss, optimizer, schedules and order of the data without a Trainer, which would add to
the time of a step of 50 ms. `fit` has the same losses. A step's time is processor time, without reading data. Every 30 steps,
the baseline also makes a step in the same process: the relative time is the ratio of the two medians, so that other load on the
machine affects both.

    python benchmarks/ladder.py --techniques baseline,z-loss,half-rope+z-loss --seeds 3
    python benchmarks/ladder.py --table
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import ladder_model
import ladder_optim
import numpy as np
import torch
from ladder_techniques import BASELINE, Technique, baseline_rate, stack
from torch import Tensor, nn

from lit_llm.core.errors import UserError
from lit_llm.data import PythonStdlib, TextFiles
from lit_llm.data.blocks import HeldOutBlocks, TrainBlocks
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.order import sample_index
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossSums, cross_entropy
from lit_llm.optim import MuonAdamW, parameter_groups
from lit_llm.tokenizers import Characters

KNOWN = {technique.name: technique for technique in (BASELINE, *ladder_model.TECHNIQUES, *ladder_optim.TECHNIQUES)}
CLIP = 1.0
CLOCK_EVERY = 30
UNSTABLE = 5.0
"""Techniques whose standard deviation over seeds is above UNSTABLE times the median are left out of the pooled noise."""
CURVE_POINTS, CURVE_TOKENS, FINAL_TOKENS = 10, 4_096, 131_072
"""Number of evaluations of a run, held-out tokens of each evaluation, and held-out tokens of the final evaluation."""


@dataclass(frozen=True)
class Size:
    """The size of a model, its batch (sequences of a step) and the length of a run."""

    layers: int
    heads: int
    width: int
    block_size: int
    batch: int
    steps: int
    """Number of steps of a run without `--steps`."""

    @property
    def tokens(self) -> int:
        return self.batch * self.block_size


SIZES = {
    "0.8M": Size(layers=4, heads=4, width=128, block_size=64, batch=12, steps=500),
    "4M": Size(layers=5, heads=4, width=256, block_size=128, batch=16, steps=1000),
    "12M": Size(layers=7, heads=6, width=384, block_size=256, batch=16, steps=2000),
}


@dataclass(frozen=True)
class Row:
    """The result of a run: a row of the CSV file."""

    size: str
    text: str
    technique: str
    seed: int
    steps: int
    tokens: int
    parameters: int
    val_loss: float
    """Final held-out loss in nats per token, over at most FINAL_TOKENS tokens."""
    curve: str
    """The text "tokens:loss …": trained tokens and held-out loss of each evaluation, over the same CURVE_TOKENS tokens."""
    ms_per_step: float
    time_ratio: float
    """Processor time per token divided by the baseline's time per token."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self.size, self.text, self.technique, self.seed, self.steps

    @property
    def points(self) -> list[tuple[int, float]]:
        pairs = (point.split(":") for point in self.curve.split())
        return [(int(tokens), float(loss)) for tokens, loss in pairs]


class Text:
    """The training and held-out blocks of a text. `name`: the text's name and the fingerprint of its tokens."""

    def __init__(self, data: TokenDataModule, name: str) -> None:
        data.setup()
        assert data.block_size is not None
        self.name = f"{name} {data.opened.fingerprint().removeprefix('tokens-')[:8]}"
        self.vocab_size = data.vocab_size
        settings: dict[str, Any] = {"block_size": data.block_size, "vocab_size": data.vocab_size}
        self.train = TrainBlocks(data.corpus.streams["train"], **settings)
        self.held_out = HeldOutBlocks(data.corpus.streams["val"], **settings)

    def batch(self, first: int, rows: int, seed: int) -> dict[str, Tensor]:
        """Return a batch of `rows` training sequences, from number `first` on in the order of the run with seed `seed`."""
        samples = sample_index(np.arange(first, first + rows), samples=len(self.train), seed=seed)
        return self.train.rows(samples).batch()

    def loss(self, model: nn.Module, tokens: int) -> float:
        """Return the held-out loss in nats per token, over about `tokens` tokens in blocks spread evenly over the text."""
        count = min(len(self.held_out), tokens // self.held_out.block_size)
        chosen = np.linspace(0, len(self.held_out) - 1, count).astype(np.int64)
        nll, targets = 0.0, 0
        for blocks in np.array_split(chosen, math.ceil(count / 64)):
            batch = self.held_out.rows(blocks).batch()
            sums = model(batch["input_ids"], batch["targets"], loss=cross_entropy)
            nll, targets = nll + sums.nll.item(), targets + int(sums.count)
        return nll / targets


def open_text(path: str | None, block_size: int) -> Text:
    """Return the text of the file or folder `path`, of which the last tenth is held out. None: Python's standard library."""
    settings: dict[str, Any] = {"block_size": block_size, "tokenizer": Characters()}
    if path is None:
        return Text(PythonStdlib(**settings), "stdlib")
    return Text(TextFiles(paths=[path], val_fraction=0.1, drop_near_duplicates=False, **settings), Path(path).stem)


class Run:
    """A model in training with a technique, and its optimizer. `total`: the run's steps, counted in batches of the baseline."""

    def __init__(self, technique: Technique, size: Size, vocab_size: int, *, seed: int, total: int) -> None:
        torch.manual_seed(seed)
        shape = {"n_layer": size.layers, "n_head": size.heads, "n_embd": size.width, "block_size": size.block_size}
        config = GPTConfig(**{**shape, "vocab_size": vocab_size, **technique.settings(size.width)})
        model: nn.Module = GPT(config)
        self.model = model if technique.model is None else technique.model(model)
        groups = parameter_groups(self.model)
        if technique.groups is not None:
            groups = technique.groups(self.model, groups)
        self.optimizer = MuonAdamW(groups, **technique.options)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.technique, self.size, self.total = technique, size, total
        self.tokens = 0

    @property
    def t(self) -> float:
        """Trained tokens divided by the tokens of a step of the baseline."""
        return self.tokens / self.size.tokens

    def rows(self) -> int:
        """Return the number of sequences of the next update."""
        if self.technique.rows is None:
            return self.size.batch
        return max(1, round(self.technique.rows(self.t + 1, self.total) * self.size.batch))

    def step(self, batch: dict[str, Tensor]) -> float:
        """Make one update. Return its processor time in seconds."""
        technique, ids, targets = self.technique, batch["input_ids"], batch["targets"]
        if technique.length is not None:
            length = ids.size(1) // technique.length(self.t + 1, self.total)
            ids, targets = ids.view(-1, length), targets.view(-1, length)
        self.tokens += ids.numel()
        begin = time.process_time()
        sums: LossSums = self.model(ids, targets, loss=technique.loss or cross_entropy)
        (sums.loss / sums.count).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        factor = (technique.rate or baseline_rate)(self.t, self.total)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        if technique.before_step is not None:
            technique.before_step(self.optimizer, self.t, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin

    @torch.no_grad()
    def evaluate(self, text: Text, tokens: int) -> float:
        self.model.eval()
        loss = text.loss(self.model, tokens)
        self.model.train()
        return loss


def train(technique: Technique, size: str, text: Text, *, seed: int, steps: int) -> Row:
    """Make one run and return its row. Random numbers depend on the seed only."""
    shape = SIZES[size]
    clock = Run(BASELINE, shape, text.vocab_size, seed=seed, total=steps)  # trained on few batches, to measure its time
    run = Run(technique, shape, text.vocab_size, seed=seed, total=steps)
    budget = steps * shape.tokens
    points = [budget * (i + 1) // CURVE_POINTS for i in range(CURVE_POINTS)]
    curve: list[str] = []
    own: list[float] = []  # seconds of a token
    baseline: list[float] = []
    first = update = 0
    while run.tokens < budget:
        batch = text.batch(first, run.rows(), seed)
        first, update = first + run.rows(), update + 1
        own.append(run.step(batch) / batch["input_ids"].numel())
        if update % CLOCK_EVERY == 1 or steps < CLOCK_EVERY:
            batch = text.batch(first, shape.batch, seed)
            clock.step(batch)  # warms the caches
            baseline.append(clock.step(batch) / shape.tokens)
            run_next = text.batch(first, run.rows(), seed)  # the run's next step is not timed, and warms the caches, too
            if run.tokens < budget:
                first, update = first + run.rows(), update + 1
                run.step(run_next)
        while len(curve) < CURVE_POINTS and run.tokens >= points[len(curve)]:
            curve.append(f"{run.tokens}:{run.evaluate(text, CURVE_TOKENS):.4f}")
    seconds = statistics.median(own)
    return Row(
        size=size,
        text=text.name,
        technique=technique.name,
        seed=seed,
        steps=steps,
        tokens=run.tokens,
        parameters=sum(p.numel() for p in run.model.parameters()),
        val_loss=round(run.evaluate(text, FINAL_TOKENS), 5),
        curve=" ".join(curve),
        ms_per_step=round(seconds * shape.tokens * 1e3, 2),
        time_ratio=round(seconds / statistics.median(baseline), 3),
    )


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the CSV file `path`; [] if the file does not exist. Raises UserError if it has other columns."""
    if not path.exists():
        return []
    types: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    convert = {field.name: types[str(field.type)] for field in fields(Row)}
    lines = csv.DictReader(_whole_lines(path).decode().splitlines())
    if lines.fieldnames is not None and list(lines.fieldnames) != list(convert):
        first = ",".join(convert)
        raise UserError(f"{path} is no table of the ladder, whose first line is {first}: choose another file (--out).")
    return [Row(**{name: value(line[name]) for name, value in convert.items()}) for line in lines]


def add_row(path: Path, row: Row) -> None:
    """Append `row` to the CSV file `path`. A new file gets a header first; an incomplete last line is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        file.truncate(len(_whole_lines(path)))
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if path.stat().st_size == 0:
            writer.writeheader()
        writer.writerow(asdict(row))


def _whole_lines(path: Path) -> bytes:
    """Return the content of a file without an incomplete last line, which an interrupted process may have written."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def climb(techniques: Sequence[Technique], size: str, text: Text, out: Path, *, seeds: Sequence[int], steps: int) -> None:
    """Make every run (technique, seed) that has no row in the CSV file `out` yet, and add its row."""
    for seed in seeds:
        for technique in techniques:
            if (size, text.name, technique.name, seed, steps) in {row.key for row in read_rows(out)}:
                continue
            row = train(technique, size, text, seed=seed, steps=steps)
            add_row(out, row)
            print(f"{row.technique}, seed {seed}: {row.val_loss:.4f}, {row.time_ratio:.2f} × the baseline's time", flush=True)


@dataclass(frozen=True)
class Summary:
    """A line of the table: one technique against the baseline. Losses are in nats per token."""

    technique: str
    runs: int
    loss: float
    spread: float
    """Standard deviation of the loss over seeds; NaN for one run."""
    difference: float
    noise: float
    """Standard error of `difference`; NaN if no technique has two seeds."""
    time: float
    tokens_to_baseline: float
    """Fraction of the run's tokens after which the mean curve reaches the baseline's final loss; infinity if it does not."""


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """Return a summary of each technique, the baseline first, then by difference. `rows`: runs of one size, text and length.

    Runs of one seed have the same data in the same order, so a run is compared with the baseline's run of the same seed. The
    noise is the standard deviation of these differences over seeds, pooled over the techniques, because each technique has few
    seeds. A technique whose deviation is more than UNSTABLE times the median deviation is left out of the pool.
    """
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_name.setdefault(row.technique, {})[row.seed] = row
    baseline = by_name.get(BASELINE.name, {})
    shared = {name: [seed for seed in runs if seed in baseline] for name, runs in by_name.items()}
    differences = {
        name: [by_name[name][seed].val_loss - baseline[seed].val_loss for seed in seeds]
        for name, seeds in shared.items()
        if seeds
    }
    others = [each for name, each in differences.items() if name != BASELINE.name and len(each) > 1]
    deviation = _pooled_deviation(others)
    found = []
    for name, each in differences.items():
        runs, target = list(by_name[name].values()), [baseline[seed].points[-1][1] for seed in shared[name]]
        losses = [row.val_loss for row in runs]
        found.append(
            Summary(
                technique=name,
                runs=len(runs),
                loss=statistics.mean(losses),
                spread=statistics.stdev(losses) if len(runs) > 1 else math.nan,
                difference=statistics.mean(each),
                noise=deviation / math.sqrt(len(each)),
                time=statistics.median(row.time_ratio for row in runs),
                tokens_to_baseline=1.0 if name == BASELINE.name else tokens_to(statistics.mean(target), runs),
            )
        )
    return sorted(found, key=lambda line: (line.technique != BASELINE.name, line.difference))


def _pooled_deviation(samples: Sequence[Sequence[float]]) -> float:
    """Return the pooled standard deviation of samples with different means; NaN without samples (see UNSTABLE)."""
    if not samples:
        return math.nan
    typical = statistics.median(statistics.stdev(each) for each in samples)
    alike = [each for each in samples if statistics.stdev(each) <= UNSTABLE * typical]
    squares = sum((len(each) - 1) * statistics.variance(each) for each in alike)
    return math.sqrt(squares / sum(len(each) - 1 for each in alike))


def tokens_to(target: float, runs: Sequence[Row]) -> float:
    """Return the fraction of a run's tokens at which the mean curve of `runs`, interpolated linearly, reaches `target`."""
    points = [
        (statistics.fmean(run.points[i][0] for run in runs), statistics.fmean(run.points[i][1] for run in runs))
        for i in range(CURVE_POINTS)
    ]
    end = points[-1][0]
    if points[0][1] <= target:
        return points[0][0] / end
    for (before, high), (after, low) in pairwise(points):
        if low <= target < high:
            return (before + (after - before) * (high - target) / (high - low)) / end
    return math.inf


def table(rows: Sequence[Row]) -> str:
    """Return Markdown text with one table for each size, text and number of steps."""
    parts = []
    for size, text, steps in sorted({(row.size, row.text, row.steps) for row in rows}):
        chosen = [row for row in rows if (row.size, row.text, row.steps) == (size, text, steps)]
        parts.append(f"{size}, {text}, {steps} steps\n")
        parts.append(
            "| technique | seeds | loss ± spread | difference | in units of noise | time per step | tokens to the baseline |"
        )
        parts.append("|---|---|---|---|---|---|---|")
        for line in summaries(chosen):
            spread = "" if math.isnan(line.spread) else f" ± {line.spread:.4f}"
            units = "" if line.technique == BASELINE.name or not line.noise > 0 else f"{line.difference / line.noise:+.1f}"
            tokens = "not reached" if math.isinf(line.tokens_to_baseline) else f"{line.tokens_to_baseline:.2f}"
            parts.append(
                f"| {line.technique} | {line.runs} | {line.loss:.4f}{spread} | {line.difference:+.4f} | {units} "
                f"| {line.time:.2f} | {tokens} |"
            )
        parts.append("")
    return "\n".join(parts)


def chosen_techniques(names: str) -> list[Technique]:
    """Return the techniques that `names`, such as "a,b,a+b", lists; a+b is both techniques at once."""
    found = []
    for name in names.split(","):
        for part in name.split("+"):
            if part not in KNOWN:
                raise UserError(f"The technique {part!r} is unknown: choose from {', '.join(KNOWN)} (--techniques).")
        found.append(stack([KNOWN[part] for part in name.split("+")]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.8M")
    parser.add_argument("--text", help="a file or folder; the last tenth is held out. Default: the standard library")
    parser.add_argument("--techniques", default=",".join(KNOWN), help="names separated by commas; a+b is both at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of the baseline's batch; default: the size's")
    parser.add_argument("--threads", type=int, default=1, help="more are not faster at 0.8M")
    parser.add_argument("--out", type=Path, default=Path("ladder.csv"))
    parser.add_argument("--table", action="store_true", help="print the table of the rows, train nothing")
    options = parser.parse_args()
    try:
        run(options)
    except UserError as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> None:
    """Print the table or train, as the flags `options` say. Raises UserError if a flag has an invalid value."""
    rows = read_rows(options.out)
    if options.table:
        if not rows:
            raise UserError(f"{options.out} has no rows: train first, or name the file of a ladder (--out).")
        print(table(rows))
        return
    steps = SIZES[options.size].steps if options.steps is None else options.steps
    for flag, value in (("steps", steps), ("seeds", options.seeds), ("threads", options.threads)):
        if value < 1:
            raise UserError(f"{value} is no number of {flag}: give 1 or more (--{flag}).")
    techniques = chosen_techniques(options.techniques)
    torch.set_num_threads(options.threads)
    text = open_text(options.text, SIZES[options.size].block_size)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    climb(techniques, options.size, text, options.out, seeds=seeds, steps=steps)


if __name__ == "__main__":
    main()
