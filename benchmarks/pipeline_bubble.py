"""Idle share of each pipeline rank for each schedule, compared with formulas, and a text picture of each rank's work over time.

The schedules are lit_llm's (`lit_llm.distributed.pipeline_schedule`, torch's schedules, gloo), but the stages sleep instead of
computing, because on a machine with fewer cores than ranks, computing would not run in parallel. A forward pass of a rank's
layers, the gradients of their inputs, and the gradients of their weights each take one unit of time.

    python benchmarks/pipeline_bubble.py [--ranks 4] [--micro_batches 8] [--unit 0.06] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from launch import report, run_ranks

from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout
from lit_llm.distributed.pipeline_schedule import ScheduleRunner
from lit_llm.distributed.pipeline_transfer import Transfer

WIDTH = 110  # characters of the picture
Work = tuple[float, float, str]
"""(start, end, mark) of a piece of work: seconds, and its character in the picture."""


class Sleep(torch.autograd.Function):
    """The identity. Its backward pass sleeps for `seconds` and appends the work to the list `done`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, mark: str, done: list[Work]) -> Tensor:
        ctx.work = seconds, mark, done
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        work(*ctx.work)
        return grad, None, None, None


def work(seconds: float, mark: str, done: list[Work]) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    done.append((start, time.perf_counter(), mark))


class SleepingStage(nn.Module):
    """A pipeline stage that sleeps for `seconds` in forward, in the gradient of its input and in the gradient of its weight."""

    def __init__(self, seconds: float, *, first: bool, last: bool, done: list[Work]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.first, self.last, self.done = seconds, first, last, done

    def forward(self, x: Tensor | None = None, *, input_ids: Tensor, number: int) -> Tensor:
        digit = number % 10
        work(self.seconds, str(digit), self.done)
        weight = Sleep.apply(self.weight, self.seconds, chr(ord("A") + digit), self.done)
        if x is None:
            x = Sleep.apply(torch.ones(1, requires_grad=True), self.seconds, chr(ord("a") + digit), self.done) + 0 * weight
        else:
            x = Sleep.apply(x, self.seconds, chr(ord("a") + digit), self.done)
        y = x * weight
        return y.sum() if self.last else y


def measure(layout: PipelineLayout, micro_batches: int, unit: float, steps: int) -> list[list[Work]]:
    """Run `steps` steps on this rank. Return the rank's work in each step, in seconds since the step's start."""
    rank, done = dist.get_rank(), list[Work]()
    group = dist.group.WORLD
    assert group is not None
    transfer = Transfer(layout, group, rank)
    stages = [
        SleepingStage(unit / len(transfer.stages), first=stage == 0, last=stage == layout.stages - 1, done=done)
        for stage in transfer.stages
    ]
    runner, found = ScheduleRunner(stages, transfer), []
    arguments = [{"input_ids": torch.zeros(1, dtype=torch.int64), "number": i} for i in range(micro_batches)]
    for _ in range(steps + 1):  # the first step also builds the schedule
        done.clear()
        dist.barrier()
        begin = time.perf_counter()
        runner.run(arguments, (1,), torch.float32, contextlib.nullcontext)
        found.append([(start - begin, end - begin, mark) for start, end, mark in done])
    return found[1:]


def formula(layout: PipelineLayout, micro_batches: int) -> float | None:
    """Return the idle share of equal stages, (S - 1) / (v M + S - 1) for S ranks of v stages and M micro-batches.

    None: the schedule splits backward passes, for which there is no formula here."""
    if KINDS[layout.schedule].splits_backward:
        return None
    v, s = layout.stages // layout.ranks, layout.ranks
    return (s - 1) / (v * micro_batches + s - 1)


def picture(ranks: list[list[Work]]) -> str:
    span = max(end for rank in ranks for _, end, _ in rank)
    lines = []
    for number, rank in enumerate(ranks):
        line = ["."] * WIDTH
        for start, end, mark in rank:
            for place in range(round(start / span * WIDTH), max(round(start / span * WIDTH) + 1, round(end / span * WIDTH))):
                line[min(place, WIDTH - 1)] = mark
        lines.append(f"rank {number} {''.join(line)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.06, help="seconds that a rank's forward pass of a micro-batch takes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one_rank", action="store_true", help="of the processes that this script starts")
    arguments = parser.parse_args()
    if arguments.one_rank:
        dist.init_process_group("gloo")
        layouts = {name: PipelineLayout(arguments.ranks, name) for name in KINDS}
        report(**{n: measure(x, arguments.micro_batches, arguments.unit, arguments.steps) for n, x in layouts.items()})
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{name}={getattr(arguments, name)}" for name in ("ranks", "micro_batches", "unit", "steps")]
        reports = run_ranks(Path(__file__), arguments.ranks, Path(folder), "--one_rank", *flags, timeout=600)
    print(f"{arguments.ranks} ranks, {arguments.micro_batches} micro-batches, unit {arguments.unit} s, {arguments.steps} steps")
    print("digits: forward of a micro-batch; small letters: gradient of the input; capitals: of the weights; dots: idle\n")
    for name in KINDS:
        layout = PipelineLayout(arguments.ranks, name)
        steps = [[rank[name][step] for rank in reports] for step in range(arguments.steps)]
        spans = [max(end for rank in step for _, end, _ in rank) for step in steps]
        idle = [
            statistics.median(1 - sum(e - s for s, e, _ in step[rank]) / span for step, span in zip(steps, spans, strict=True))
            for rank in range(arguments.ranks)
        ]
        expected = formula(layout, arguments.micro_batches)
        wanted = "no formula" if expected is None else f"formula {expected:.3f}"
        print(f"{name}: idle {' '.join(f'{share:.3f}' for share in idle)}, {wanted}")
        print(picture(steps[0]) + "\n")


if __name__ == "__main__":
    main()
