"""Exact checks of the targets in batches."""

from __future__ import annotations

import torch
from torch import Tensor

from ._torch import IGNORED
from .health_readings import Readings


def ids_of(batch: object) -> Tensor | None:
    """The input ids (B, T) of a batch that is a dict whose `input_ids` are a 2-D integer tensor; None for any other batch."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() and not ids.is_floating_point() else None


def targets_of(batch: object) -> Tensor | None:
    """The targets (B, T) of a batch that is a dict with `targets` of the shape of its input ids; None for any other batch."""
    ids, targets = ids_of(batch), batch.get("targets") if isinstance(batch, dict) else None
    return targets if ids is not None and isinstance(targets, Tensor) and targets.shape == ids.shape else None


def compare_targets(ids: Tensor, targets: Tensor, readings: Readings, split: str = "") -> tuple[Tensor, Tensor]:
    """Add to `readings` the share of targets that equal the next position's input id, as all targets should.

    Only those targets are compared that count (are not ignored), and whose next target counts, too.

    Args:
        split: beginning of the metric's name: "validation_" for a batch of validation.

    Returns:
        Two masks: counted (not ignored) targets, (B, T), and the targets compared, (B, T - 1).
    """
    counted = targets != IGNORED  # (B, T)
    followed = counted[:, :-1] & counted[:, 1:]  # behind the last counted target of an answer comes another conversation
    readings.mean(f"health/{split}shifted_targets", ((targets[:, :-1] == ids[:, 1:]) & followed).sum(), followed.sum())
    return counted, followed


def check_targets(ids: Tensor, targets: Tensor, readings: Readings) -> None:
    """Add to `readings` the share found by `compare_targets`, and shares that reveal further mistakes in targets.

    These are shares of: ignored targets; counted targets that equal the input two places ahead, their own input, or the next
    sequence's first input; positions with the same id in all sequences; and answers whose last token is the commonest one.
    """
    counted, followed = compare_targets(ids, targets, readings)
    readings.mean("health/ignored_targets", counted.numel() - counted.sum(), counted.numel())
    twice = followed[:, :-1] & followed[:, 1:]
    readings.mean("health/twice_shifted_targets", ((targets[:, :-2] == ids[:, 2:]) & twice).sum(), twice.sum())
    readings.mean("health/copied_targets", ((targets == ids) & counted).sum(), counted.sum())
    pairs = counted[:-1, -1]  # of neighbours in the batch
    readings.mean("health/consecutive_sequences", ((targets[:-1, -1] == ids[1:, 0]) & pairs).sum(), pairs.sum())
    columns, rows = (ids == ids[:1]).all(dim=0), float(ids.size(0) > 3)  # a few rows may be alike by chance
    readings.mean("health/equal_columns", columns.sum() * rows, columns.numel() * rows)
    ends = counted & ~counted.roll(-1, dims=1)  # (B, T): of answers
    ends[:, -1] = False  # a cut one
    others = -1 - torch.arange(ends.numel(), device=ids.device).view_as(ends)  # each once
    last = torch.where(ends, targets, others).flatten().sort().values  # not mode(), which waits for the device
    at = torch.arange(last.numel(), device=ids.device)
    begins = torch.where(last == last.roll(1), 0, at).cummax(dim=0).values  # of the run of equal tokens at each place
    readings.mean("health/answer_ends", ((at - begins).amax() + 1) * ends.any(), ends.sum())
