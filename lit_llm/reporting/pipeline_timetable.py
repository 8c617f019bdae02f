"""The timetable of a pipeline's schedule: start and end of each task (a stage's forward or backward pass) on each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_order import Task, orders

DURATION = {"forward": 1, "backward": 2, "gradients of inputs": 1, "gradients of weights": 1}
"""{kind of task: assumed duration, in forward passes}. A "backward" task computes the gradients of inputs and of weights."""


class Box(NamedTuple):
    """Record of a task of the timetable: the rank that runs it, and its start and end in units of time."""

    rank: int
    task: Task
    start: int
    stop: int


@lru_cache(maxsize=8)
def timetable(layout: PipelineLayout, micro_batches: int) -> tuple[Box, ...]:
    """Return all tasks with their times, in an order in which they can run, if stages are equally fast and sending is free."""
    waiting = [deque(order) for order in orders(layout, micro_batches)]
    done: dict[Task, int] = {}
    clock, boxes = [0] * layout.ranks, list[Box]()
    while any(waiting):
        before = len(boxes)
        for rank, order in enumerate(waiting):
            while order and done.keys() >= {*(needed := _needed(order[0], layout.stages - 1))}:
                start, together = max([clock[rank], *(done[need] for need in needed)]), order.popleft()
                clock[rank] = start + sum(DURATION[task.kind] for task in together)
                for task in together:  # results are sent when all tasks of the action are done
                    boxes.append(Box(rank, task, start, start + DURATION[task.kind]))
                    start += DURATION[task.kind]
                    # Other stages wait for "backward": either kind of backward pass computes the gradient of inputs.
                    done[task._replace(kind="backward") if task.kind == "gradients of inputs" else task] = clock[rank]
        assert len(boxes) > before, "the order of actions waits for itself"
    return tuple(boxes)


def _needed(together: Sequence[Task], last: int) -> list[Task]:
    """Return the tasks that must be done before the tasks `together`, which a rank runs as one action: tasks of neighbouring
    stages, or, for a backward pass of the stage `last`, the forward pass that computes the loss.
    """
    tasks = []
    for kind, stage, micro_batch in together:
        if kind == "forward":
            tasks += [Task("forward", stage - 1, micro_batch)] if stage else []
        elif kind != "gradients of weights":  # whose gradient of inputs is earlier in the rank's own order
            tasks.append(Task("backward", stage + 1, micro_batch) if stage < last else Task("forward", stage, micro_batch))
    return tasks
