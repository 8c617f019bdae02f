"""What FSDP2 shards, and when it keeps weights or gradients whole. `MeshStrategy` and the planner decide by these functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

KEPT_WHOLE_SHARE = 1 / 8
"""Share of a device's memory up to which whole weights, or whole gradients, are kept where a setting is auto."""


class KeptWhole(NamedTuple):
    """What every rank keeps whole, at the cost of memory."""

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
    """What a rank keeps whole. With auto: weights and gradients each if they take at most an eighth of its memory.

    A pipeline keeps both: its micro-batches follow each other too closely to gather and reduce for each.

    Args:
        weight_bytes: the rank's whole weights, as FSDP2 gathers them.
        gradient_bytes: their whole gradients, in fp32.
        memory: bytes of the rank's device. 0 if unknown.
    """
    if pipeline:
        return KeptWhole(weights=reshard_after_forward is not True, gradients=True)
    asked = ((reshard_after_forward, weight_bytes), (reduce_each_micro_batch, gradient_bytes))
    return KeptWhole(*(size <= KEPT_WHOLE_SHARE * memory if value == "auto" else not value for value, size in asked))


def sharded_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension by which matrices of experts, (E, …), are sharded: whole experts if possible, else rows or columns.

    0, unevenly, if no dimension is a multiple of `shards`: FSDP2 shards only the first one unevenly.
    """
    return next((dimension for dimension, size in enumerate(shape) if size % shards == 0), 0)
