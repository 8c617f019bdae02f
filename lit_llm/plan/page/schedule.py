"""When each rank of a pipeline computes what: torch's order of actions, played with equal stages and no time between them.

A forward pass takes 1, the gradient of an input 1, and that of weights 1.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout

DURATION = {"forward": 1, "backward": 2, "gradients of inputs": 1, "gradients of weights": 1}
_OF_TORCH = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "gradients of inputs",
    "BACKWARD_WEIGHT": "gradients of weights",
}


class Task(NamedTuple):
    """Work of one stage on one micro-batch; `kind` is a key of DURATION."""

    kind: str
    stage: int
    micro_batch: int


class Box(NamedTuple):
    """A task on its rank, in units of time."""

    rank: int
    task: Task
    start: int
    stop: int


@lru_cache(maxsize=8)
def played(layout: PipelineLayout, micro_batches: int) -> tuple[Box, ...]:
    """All tasks of a step, in an order in which they can run."""
    orders = _orders(layout, micro_batches)
    done: dict[Task, int] = {}
    clock, place = [0] * layout.ranks, [0] * layout.ranks
    found: list[Box] = []
    while any(place[rank] < len(order) for rank, order in enumerate(orders)):
        before = len(found)
        for rank, order in enumerate(orders):
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


def _orders(layout: PipelineLayout, micro_batches: int) -> list[list[list[Task]]]:
    """Of each rank: tasks in their order, in groups that run together."""
    if layout.stages == layout.ranks:  # torch has no list of actions for GPipe and 1F1B
        return [[[task] for task in _of_one_stage(layout, rank, micro_batches)] for rank in range(layout.ranks)]
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [  # what torch reads of a stage to order its actions; a real one needs processes
        SimpleNamespace(
            stage_index=stage, num_stages=layout.stages, group_rank=0, group_size=layout.ranks, has_backward=True, submod=None
        )
        for stage in layout.stages_of(0)
    ]
    make: Any = get_schedule_class(KINDS[layout.schedule].torch_name)
    order = make(stages, micro_batches, loss_fn=lambda output, target: output).pipeline_order
    return [
        [
            [
                Task(_OF_TORCH[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in action.sub_actions or (action,)
            ]
            for action in order[rank]
            if action is not None
        ]
        for rank in range(layout.ranks)
    ]


def _of_one_stage(layout: PipelineLayout, rank: int, micro_batches: int) -> list[Task]:
    ahead = micro_batches if layout.schedule == "gpipe" else min(micro_batches, layout.ranks - rank)
    found = [Task("forward", rank, i) for i in range(ahead)]
    for i in range(micro_batches):
        found.append(Task("backward", rank, i))
        if ahead + i < micro_batches:
            found.append(Task("forward", rank, ahead + i))
    return found
