"""Accumulation from batch sizes. Without torch, so that the planner and the data modules share it."""

from __future__ import annotations

from lit_llm.errors import UserError


def accumulation_steps(
    global_batch_size: int,
    micro_batch_size: int | None,
    world_size: int,
    *,
    label: str = "global_batch_size {}",
    flag: str = "--data.global_batch_size",
) -> int:
    """Micro-batches per optimizer step on each rank: A = G / (micro * W).

    Args:
        global_batch_size: G, sequences per optimizer step over all ranks.
        micro_batch_size: sequences per forward pass of one rank. None: one micro-batch of G / W sequences per step.
        world_size: W, data-parallel ranks.
        label: how the message names G, with {} for the number.
        flag: the option that sets it.

    Raises:
        UserError: if the division leaves a remainder. The message names the nearest sizes that leave none, and the
            largest micro-batch below this one that divides each rank's share, if there is one.
    """
    unit = (micro_batch_size or 1) * world_size
    if global_batch_size % unit == 0:
        return global_batch_size // unit if micro_batch_size is not None else 1
    below = global_batch_size // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    ranks = f"{world_size} data-parallel rank{'s' if world_size > 1 else ''}"
    parts = ranks if micro_batch_size is None else f"micro_batch_size {micro_batch_size} x {ranks} = {unit}"
    lower = ""
    if micro_batch_size is not None and global_batch_size % world_size == 0:
        share = global_batch_size // world_size
        largest = next(size for size in range(micro_batch_size - 1, 0, -1) if share % size == 0)
        lower = f", or lower --data.micro_batch_size to {largest}"
    raise UserError(f"{label.format(global_batch_size)} is not a multiple of {parts}: use {nearest} ({flag}){lower}.")
