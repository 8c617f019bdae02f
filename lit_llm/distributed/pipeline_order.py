"""The stages of each rank of a pipeline, and the order in which torch's schedules run a rank's tasks, for the planner.

torch is imported only for schedules with several stages on a rank.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout

_OF_TORCH = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "gradients of inputs",
    "BACKWARD_WEIGHT": "gradients of weights",
}


class StageShare(NamedTuple):
    """Record of a pipeline's stage: the layers `start` to `stop` - 1; if `first` also the embedding, if `last` norm and head.

    `number` counts the stages of all ranks. `ahead`: how many blocks that predict later tokens the stage has after its layers.
    """

    start: int
    stop: int
    first: bool
    last: bool
    number: int
    ahead: int

    @property
    def layers(self) -> range:
        """Numbers of the stage's blocks, including the blocks that predict ahead."""
        return range(self.start, self.stop + self.ahead)


class Task(NamedTuple):
    """Record of work of a stage on a micro-batch: "forward", "backward", "gradients of inputs" or "gradients of weights"."""

    kind: str
    stage: int
    micro_batch: int


def bubble(layout: PipelineLayout, micro_batches: int) -> float:
    """The fraction of an optimizer step in which a rank of the pipeline waits, if all stages take equal time.

    (p − 1)/(m + p − 1) for GPipe and 1F1B (Huang et al. 2019); with v stages per rank (p − 1)/(v·m + p − 1) (Narayanan et al.
    2021). For the schedules that compute gradients of weights later, assume one unit of time for each of a forward pass, a
    gradient of inputs and a gradient of weights of half of a rank's layers. In 6·m units of work, ZB-V waits (p − 1) units and
    DualPipeV 2(p − 1) units (Qi et al. 2024; DeepSeek-AI 2025).
    """
    waits, work = layout.ranks - 1, {"zbv": 6.0, "dualpipev": 3.0}.get(layout.schedule, layout.stages / layout.ranks)
    return waits / (work * micro_batches + waits)


def shares(layout: PipelineLayout, n_layer: int, rank: int, ahead: int = 0) -> tuple[StageShare, ...]:
    """The stages of a pipeline's rank. `ahead` is `GPTConfig.predict_ahead`: blocks that the last stage has in addition."""
    layers, last = layout.layers(n_layer), layout.stages - 1
    return tuple(
        StageShare(layers[stage].start, layers[stage].stop, stage == 0, stage == last, stage, ahead * (stage == last))
        for stage in layout.stages_of(rank)
    )


def micro_batches_to_play(layout: PipelineLayout, micro_batches: int) -> int:
    """The number of micro-batches that a memory plan simulates for a step of `micro_batches`: enough for the same peak."""
    uneven = layout.schedule == "interleaved1f1b" and micro_batches % layout.ranks
    return micro_batches if layout.schedule == "gpipe" or uneven else min(micro_batches, 2 * layout.stages)


@lru_cache(maxsize=64)
def orders(layout: PipelineLayout, micro_batches: int) -> list[list[list[Task]]]:
    """For each rank, the list of its task groups in the schedule's order for one step. The tasks of a group run together."""
    if layout.stages == layout.ranks:  # torch has no list of actions for GPipe and 1F1B
        return [[[task] for task in _of_one_stage(layout, rank, micro_batches)] for rank in range(layout.ranks)]
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [  # the attributes that torch reads to order actions; a real stage needs processes
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
    tasks = [Task("forward", rank, i) for i in range(ahead)]
    for i in range(micro_batches):
        tasks.append(Task("backward", rank, i))
        if ahead + i < micro_batches:
            tasks.append(Task("forward", rank, ahead + i))
    return tasks
