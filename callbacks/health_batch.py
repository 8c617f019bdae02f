"""Exact checks of the ids in batches: targets, repeated sequences, tokens never seen."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import process_count
from .health_readings import Readings

SLOTS = 2**16
"""Sequences that are remembered, at most: 256 KB."""
_FOLD_AT = 2**13  # sequences whose hashes wait to be looked up: 64 KB
IGNORED = -100
"""The target that no loss counts."""


def ids_of(batch: object) -> Tensor | None:
    """(B, T): the input ids of a batch that is a dict with `input_ids`; None of any other."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() and not ids.is_floating_point() else None


def targets_of(batch: object) -> Tensor | None:
    """(B, T): the targets of a batch that is a dict with `targets` of the shape of its ids."""
    ids, targets = ids_of(batch), batch.get("targets") if isinstance(batch, dict) else None
    return targets if ids is not None and isinstance(targets, Tensor) and targets.shape == ids.shape else None


def compare_targets(ids: Tensor, targets: Tensor, readings: Readings, split: str = "") -> tuple[Tensor, Tensor]:
    """Add the shares of ignored targets, and of counted targets that equal the next input. Returns both masks.

    Args:
        split: "validation_" for a batch of it.
    """
    counted = targets != IGNORED  # (B, T)
    followed = counted[:, :-1] & counted[:, 1:]  # behind the last counted target of an answer comes another conversation
    readings.mean(f"health/{split}ignored_targets", counted.numel() - counted.sum(), counted.numel())
    readings.mean(f"health/{split}shifted_targets", ((targets[:, :-1] == ids[:, 1:]) & followed).sum(), followed.sum())
    return counted, followed


def check_targets(ids: Tensor, targets: Tensor, readings: Readings) -> None:
    """Add what `compare_targets` does, and shares of counted targets that equal other inputs."""
    counted, followed = compare_targets(ids, targets, readings)
    twice = followed[:, :-1] & followed[:, 1:]
    readings.mean("health/twice_shifted_targets", ((targets[:, :-2] == ids[:, 2:]) & twice).sum(), twice.sum())
    readings.mean("health/copied_targets", ((targets == ids) & counted).sum(), counted.sum())
    pairs = counted[:-1, -1]  # of neighbours in the batch
    readings.mean("health/consecutive_sequences", ((targets[:-1, -1] == ids[1:, 0]) & pairs).sum(), pairs.sum())
    columns, rows = (ids == ids[:1]).all(dim=0), float(ids.size(0) > 3)  # a few rows may be alike by chance
    readings.mean("health/equal_columns", columns.sum() * rows, columns.numel() * rows)
    readings.mean("health/opening_targets", counted[:, 0].sum(), counted.size(0))
    ends = counted & ~counted.roll(-1, dims=1)  # (B, T): of answers
    ends[:, -1] = False  # a cut one
    others = -1 - torch.arange(ends.numel(), device=ids.device).view_as(ends)  # each once
    last = torch.where(ends, targets, others).flatten().sort().values  # not mode(), which waits for the device
    at = torch.arange(last.numel(), device=ids.device)
    begins = torch.where(last == last.roll(1), 0, at).cummax(dim=0).values  # of the run of equal tokens at each place
    readings.mean("health/answer_ends", ((at - begins).amax() + 1) * ends.any(), ends.sum())


class SeenSequences:
    """Counts sequences that have occurred before on this rank, in a table of hashes. No host synchronisation.

    A slot holds the last sequence that was hashed to it, so old ones are forgotten. Two different sequences count as one with
    a probability of 2⁻³².
    """

    def __init__(self, device: torch.device) -> None:
        self._table = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self._factors = torch.empty(0, dtype=torch.int64, device=device)
        self._waiting: list[Tensor] = []
        self._latest = self._factors
        self._waiting_count = 0
        self._repeated = torch.zeros((), dtype=torch.int64, device=device)
        self._count = 0

    def add(self, ids: Tensor) -> None:
        """Note the sequences of (B, T) ids."""
        if self._factors.numel() < ids.size(1):  # multiplicative hashing: random odd factors, modulo 2⁶⁴
            drawn = torch.randint(2**62, (ids.size(1),), generator=torch.Generator().manual_seed(0))
            self._factors = (drawn * 2 + 1).to(ids.device)
        self._latest = ((ids.long() + 1) * self._factors[: ids.size(1)]).sum(dim=1)
        self._waiting.append(self._latest)
        self._waiting_count += ids.size(0)
        if self._waiting_count >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        if not self._waiting:
            return
        hashes = torch.cat(self._waiting).sort().values  # (N,)
        first = torch.ones_like(hashes, dtype=torch.bool)
        first[1:] = hashes[1:] != hashes[:-1]
        slots, marks = (hashes >> 48) & (SLOTS - 1), (hashes >> 16).to(torch.int32)
        new = first & (self._table[slots] != marks)
        self._repeated += hashes.numel() - new.sum()
        self._count += hashes.numel()
        self._table[slots] = marks
        self._waiting, self._waiting_count = [], 0

    def add_shared_to(self, readings: Readings) -> None:
        """Add whether the first of the last noted sequences is that of another rank, too. A collective."""
        mine = self._latest[:1]
        all_ranks = [torch.empty_like(mine) for _ in range(process_count())]
        dist.all_gather(all_ranks, mine)
        readings.mean("health/shared_samples", (torch.cat(all_ranks) == mine).sum() > 1, 1.0)

    def add_to(self, readings: Readings) -> None:
        """Add the share of repeated sequences since the last call."""
        self._fold()
        readings.mean("health/repeated_samples", self._repeated, self._count)
        self._repeated, self._count = torch.zeros_like(self._repeated), 0


class SeenTokens:
    """Which ids have occurred in inputs.

    Args:
        rows: of the embedding.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._seen = torch.zeros(rows, dtype=torch.uint8, device=device)

    def add(self, ids: Tensor) -> None:
        """Note (B, T) ids. One beyond the embedding counts as its last."""
        self._seen.index_fill_(0, ids.flatten().clamp(0, self._seen.numel() - 1).long(), 1)

    def add_to(self, readings: Readings, vocabulary: int | None) -> None:
        """Add the share of ids that no rank has seen. Ids from `vocabulary` on are padding. A collective."""
        if process_count() > 1:
            dist.all_reduce(self._seen, op=dist.ReduceOp.MAX)
        seen = self._seen[:vocabulary]
        readings.mean("health/untouched_embeddings", (seen == 0).sum(), seen.numel())
        readings.largest("health/largest_id", (torch.arange(seen.numel(), device=seen.device) * seen).amax())
