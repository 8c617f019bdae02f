"""Rules of FSDP2, for training and for the planner: when ranks keep weights or gradients whole, and how experts are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

KEPT_WHOLE_SHARE = 1 / 8
"""Share of a device's memory up to which whole weights, or whole gradients, are kept where a setting is auto."""


class KeptWhole(NamedTuple):
    """Whether every rank keeps weights and gradients whole within a step, which needs memory and saves communication."""

    weights: bool
    """Gathered weights stay from their first use in a step to their last one: one gather instead of two a micro-batch."""
    gradients: bool
    """Gradients are summed over micro-batches before they are reduced: one reduction a step."""


def keep(
    reshard_after_forward: bool | Literal["auto"],
    reduce_each_micro_batch: bool | Literal["auto"],
    *,
    pipeline: bool,
    weight_bytes: int,
    gradient_bytes: int,
    memory: float,
) -> KeptWhole:
    """Decide what a rank keeps whole. With auto, it keeps weights, or gradients, that take at most an eighth of its memory.

    A pipeline keeps gradients always, and weights unless `reshard_after_forward` is True: its micro-batches follow each other
    too closely to gather and reduce for each.

    Args:
        weight_bytes: bytes of the rank's whole weights, as FSDP2 gathers them.
        gradient_bytes: bytes of the rank's whole gradients, in fp32.
        memory: bytes of the rank's device; 0 if they are not known.
    """
    if pipeline:
        return KeptWhole(weights=reshard_after_forward is not True, gradients=True)
    asked = ((reshard_after_forward, weight_bytes), (reduce_each_micro_batch, gradient_bytes))
    return KeptWhole(*(size <= KEPT_WHOLE_SHARE * memory if value == "auto" else not value for value, size in asked))


def sharded_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension along which the matrices of experts, (E, …), are sharded: whole experts if possible, else rows or columns.

    Returns 0 if no dimension is a multiple of `shards`, because FSDP2 can shard only the first dimension unevenly.
    """
    return next((dimension for dimension, size in enumerate(shape) if size % shards == 0), 0)
