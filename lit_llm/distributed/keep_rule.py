"""Rules for FSDP2, for training and the planner: whether ranks keep whole weights or gradients, and how experts are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

KEPT_WHOLE_SHARE = 1 / 8
"""The largest share of a device's memory that whole weights, or whole gradients, may take if a setting is auto."""


class KeptWhole(NamedTuple):
    """Record of whether each rank keeps whole weights, and whole gradients, within an optimizer step. Whole tensors take more
    memory and need less communication than each rank's shards."""

    weights: bool
    """Whether gathered weights stay from their first to their last use in a step: one gather a step, not two a micro-batch."""
    gradients: bool
    """Whether gradients are summed over micro-batches before they are reduced: one reduction a step, not one a micro-batch."""


def keep(
    reshard_after_forward: bool | Literal["auto"],
    reduce_each_micro_batch: bool | Literal["auto"],
    *,
    pipeline: bool,
    weight_bytes: int,
    gradient_bytes: int,
    memory: float,
) -> KeptWhole:
    """Decide whether a rank keeps whole weights and whole gradients within an optimizer step.

    It keeps weights if `reshard_after_forward` is False, gradients if `reduce_each_micro_batch` is False. "auto": it keeps them
    if they take at most an eighth of the device's memory.

    A pipeline always keeps whole gradients, and whole weights unless `reshard_after_forward` is True: micro-batches follow each
    other too closely in a pipeline to gather and reduce for each.

    Args:
        weight_bytes: bytes of the rank's whole weights, in the dtypes in which FSDP2 gathers weights.
        gradient_bytes: bytes of the rank's whole gradients, in fp32.
        memory: bytes of memory of the rank's device. 0: unknown, so that auto keeps neither.
    """
    if pipeline:
        return KeptWhole(weights=reshard_after_forward is not True, gradients=True)
    asked = ((reshard_after_forward, weight_bytes), (reduce_each_micro_batch, gradient_bytes))
    return KeptWhole(*(size <= KEPT_WHOLE_SHARE * memory if value == "auto" else not value for value, size in asked))


def sharded_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension along which FSDP2 splits a tensor of `shape`, the matrices (E, r, c) of E experts, into `shards` parts.

    It is the first dimension that `shards` divides; 0 keeps experts whole. If `shards` divides none, it is 0, because FSDP2 can
    shard only the first dimension unevenly.
    """
    return next((dimension for dimension, size in enumerate(shape) if size % shards == 0), 0)
