"""What a rank of a pipeline holds: weights of its stages, and activations of micro-batches between forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.parameters import Weight


class StageShare(NamedTuple):
    """A stage of a rank, at the moment when the rank holds the most activations."""

    start: int
    """First layer."""
    stop: int
    """The layer behind the last one."""
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the norm and the head."""
    in_flight: int
    """Micro-batches that are between their forward and their backward pass."""


def bubble(layout: PipelineLayout, micro_batches: int) -> float:
    """Fraction of a step in which a rank waits, with equal stages.

    (p − 1)/(m + p − 1) for GPipe and 1F1B (Huang et al. 2019); with v stages per rank (p − 1)/(v·m + p − 1) (Narayanan et al.
    2021). For the schedules that compute gradients of weights later, a forward pass, the gradient of an input and that of
    weights take equal times: ZB-V waits (p − 1) such times of half of a rank's layers, DualPipeV 2(p − 1), in 6·m of work
    (Qi et al. 2024; DeepSeek-AI 2025).
    """
    waits, work = layout.ranks - 1, {"zbv": 6.0, "dualpipev": 3.0}.get(layout.schedule, layout.stages / layout.ranks)
    return waits / (work * micro_batches + waits)


def in_flight(layout: PipelineLayout, rank: int, micro_batches: int) -> dict[int, int]:
    """By stage of a rank, how many micro-batches are between forward and backward when that is most in all.

    GPipe holds all. The others begin as torch's schedules do, and then hold no more: before its first backward pass, a rank
    has done these forward passes.
    """
    p, m, r = layout.ranks, micro_batches, rank
    stages = layout.stages_of(rank)
    if layout.schedule == "gpipe":
        return dict.fromkeys(stages, m)
    if layout.schedule == "interleaved1f1b":
        together = m // max(1, m // p)  # micro-batches of one stage in a row
        forwards = min((len(stages) - 1) * together + 2 * (p - 1 - r) + 1, m * len(stages))
        done = Counter(stages[i // together % len(stages)] for i in range(forwards))
        return {stage: done[stage] for stage in stages}
    if layout.schedule == "zbv":
        return dict(zip(stages, (min(m, 2 * p - r - 1), min(m, r + 1)), strict=True))
    if layout.schedule == "dualpipev":
        return dict(zip(stages, (min(m, 2 * p - r), min(m, r + 1)), strict=True))
    return {stage: min(m, layout.stages - stage) for stage in stages}


def shares(layout: PipelineLayout, n_layer: int, rank: int, micro_batches: int) -> tuple[StageShare, ...]:
    """The stages of a rank."""
    layers, last = layout.layers(n_layer), layout.stages - 1
    return tuple(
        StageShare(layers[stage].start, layers[stage].stop, stage == 0, stage == last, held)
        for stage, held in in_flight(layout, rank, micro_batches).items()
    )


def weights_of_stages(weights: tuple[Weight, ...], stages: Sequence[StageShare]) -> tuple[Weight, ...]:
    """The weights of a rank's stages. A tied embedding is also on the rank of the last stage."""
    blocks = sum(stage.stop - stage.start for stage in stages)
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    tied = not any(weight.part == "output head" for weight in weights)

    def is_held(weight: Weight) -> bool:
        if weight.times:
            return True
        if weight.part == "token embedding":
            return first or (last and tied)
        return first if weight.part == "position embedding" else last

    return tuple(replace(w, times=blocks) if w.times else w for w in weights if is_held(w))
