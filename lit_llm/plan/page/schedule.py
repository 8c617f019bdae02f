"""When each rank of a pipeline computes what: torch's order of actions, played with equal stages and no time between them.

A forward pass takes 1, the gradient of an input 1, and that of weights 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.pipeline import Task, orders

DURATION = {"forward": 1, "backward": 2, "gradients of inputs": 1, "gradients of weights": 1}


class Box(NamedTuple):
    """A task on its rank, in units of time."""

    rank: int
    task: Task
    start: int
    stop: int


@lru_cache(maxsize=8)
def played(layout: PipelineLayout, micro_batches: int) -> tuple[Box, ...]:
    """All tasks of a step, in an order in which they can run."""
    of_ranks = orders(layout, micro_batches)
    done: dict[Task, int] = {}
    clock, place = [0] * layout.ranks, [0] * layout.ranks
    found: list[Box] = []
    while any(place[rank] < len(order) for rank, order in enumerate(of_ranks)):
        before = len(found)
        for rank, order in enumerate(of_ranks):
            while place[rank] < len(order):
                together = order[place[rank]]
                needed = [need for task in together if (need := _needed(task, layout.stages - 1))]
                if any(need not in done for need in needed):
                    break
                start = max([clock[rank], *(done[need] for need in needed)])
                clock[rank] = start + sum(DURATION[task.kind] for task in together)
                for task in together:  # their results are sent when all are done
                    found.append(Box(rank, task, start, start + DURATION[task.kind]))
                    start += DURATION[task.kind]
                    done[_result(task)] = clock[rank]
                place[rank] += 1
        assert len(found) > before, "the order of actions waits for itself"
    return tuple(found)


def idle_share(boxes: tuple[Box, ...]) -> float:
    """The share of all ranks' time without a task."""
    ranks, end = 1 + max(box.rank for box in boxes), max(box.stop for box in boxes)
    return 1 - sum(box.stop - box.start for box in boxes) / (ranks * end)


def _needed(task: Task, last: int) -> Task | None:
    """The task of another stage, or of the loss, that must be done before."""
    kind, stage, micro_batch = task
    if kind == "forward":
        return Task("forward", stage - 1, micro_batch) if stage else None
    if kind == "gradients of weights":
        return None  # after the gradient of the input, which is earlier in the rank's order
    return Task("backward", stage + 1, micro_batch) if stage < last else Task("forward", stage, micro_batch)


def _result(task: Task) -> Task:
    """A task whose result others need, whichever of the kinds of backward passes it is."""
    return task._replace(kind="backward") if task.kind == "gradients of inputs" else task
