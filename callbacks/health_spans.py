"""Counts text spans that occur twice in training, or in training and validation, on the device without host synchronisation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ._torch import gathered, process_count
from .health_readings import Readings

SPAN = 48
"""Number of tokens in a span; half a sequence if that is less. Spans of less than 16 tokens recur by chance: not compared."""
SHORTEST = 16
_FEWEST_VALIDATED, _MOST_VALIDATED = 40, 4096
_SLOTS = 2**16
_SAMPLED = 16
_FACTOR = 6364136223846793005  # odd, so that it has an inverse modulo 2^64; Knuth's constant for 64-bit generators
_INVERSE = pow(_FACTOR, -1, 2**64)
_MIX = -7046029254386353131  # 2^64 / golden ratio, as int64


def span_hashes(ids_BT: Tensor, length: int) -> Tensor:
    """A hash of each span of `length` ids: (B, T - length + 1) int64. Equal spans have equal hashes, wherever they are.

    The hash is a polynomial in a fixed factor modulo 2^64, computed as a difference of prefix sums. Division by a power of the
    factor makes it independent of the span's position.
    """
    steps = ids_BT.shape[1] + 1
    mixed_BT = (ids_BT.long() + 1) * _MIX
    mixed_BT = (mixed_BT ^ (mixed_BT >> 29)) * _powers(_FACTOR, steps, ids_BT.device)[:-1]
    sums_BT = pad(mixed_BT.cumsum(1), (1, 0))
    hashes = (sums_BT[:, length:] - sums_BT[:, :-length]) * _powers(_INVERSE, steps, ids_BT.device)[: steps - length]
    return hashes ^ (hashes >> 32)


def span_length(ids_BT: Tensor) -> int | None:
    """Number of tokens of a span in sequences (B, T); None if spans would be shorter than SHORTEST."""
    length = min(SPAN, ids_BT.shape[1] // 2)
    return length if length >= SHORTEST else None


def _powers(factor: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: 1, factor, factor², … modulo 2^64."""
    signed = factor - 2**64 if factor >= 2**63 else factor
    powers = torch.full((count,), signed, dtype=torch.int64, device=device)
    powers[0] = 1
    return powers.cumprod(0)


class ValidationOverlap:
    """Measures the share of the validation text's spans that have occurred in training since this launch's first validation.

    At most 4,096 spans are remembered on a rank. Spans that the validation text has several times, such as those of a template,
    do not count. If all ranks together have fewer than 40 spans, as with `limit_val_batches`, no share is computed, because it
    would depend on chance.
    """

    def __init__(self) -> None:
        self._remembered: list[Tensor] = []
        self._spans: Tensor | None = None  # sorted hashes, of all ranks
        self._found: Tensor | None = None  # 1 if it occurred
        self._length: int | None = None

    def remember(self, ids_BT: Tensor) -> None:
        """Remember adjacent, not overlapping, spans of a batch (B, T) of the first validation; later validations add none."""
        length = span_length(ids_BT)
        known = sum(len(spans) for spans in self._remembered)
        if self._spans is None and known < _MOST_VALIDATED and length is not None and self._length in (None, length):
            self._length = length
            self._remembered.append(span_hashes(ids_BT, length)[:, ::length].flatten())

    def compare_from_now(self, device: torch.device) -> None:
        """End the first validation: gather the spans of all ranks. A collective at the first call; later calls do nothing."""
        if self._spans is not None:
            return
        mine = torch.cat(self._remembered)[:_MOST_VALIDATED].cpu() if self._remembered else None
        ranks = gathered((self._length, mine))
        known = [spans for _, spans in ranks if spans is not None]
        self._length = next((length for length, _ in ranks if length is not None), None)
        if known:
            spans, counts = torch.cat(known).unique(return_counts=True)
            spans = spans[counts == 1]
            self._spans = spans.to(device) if len(spans) >= _FEWEST_VALIDATED else spans[:0]
            self._found = torch.zeros(len(self._spans), dtype=torch.uint8, device=device)
        self._remembered = []

    def add(self, ids_BT: Tensor) -> None:
        """Mark the remembered spans that occur in a training batch (B, T), at any position."""
        if self._spans is None or self._found is None or self._length is None:
            return
        if ids_BT.shape[1] < self._length or not len(self._spans):
            return
        hashes = span_hashes(ids_BT, self._length).flatten()
        at = torch.searchsorted(self._spans, hashes).clamp(max=len(self._spans) - 1)
        # Not a boolean index, whose size the host would have to know.
        self._found.scatter_reduce_(0, at, (self._spans[at] == hashes).to(torch.uint8), "amax")

    def add_to(self, readings: Readings) -> None:
        """Add to `readings` the share of remembered spans marked so far. Adds nothing before the end of the first validation.

        A collective.
        """
        if self._found is None or not len(self._found):
            return
        if process_count() > 1:
            dist.all_reduce(self._found, op=dist.ReduceOp.MAX)
        readings.mean("health/validation_overlap", self._found.sum(), self._found.numel())


class RepeatedText:
    """Measures the shares of sequences and of spans that have occurred before on this rank."""

    def __init__(self) -> None:
        self._sequences = _Seen("health/repeated_samples", 1)
        self._spans = _Seen("health/repeated_spans", _SAMPLED)

    def add(self, ids_BT: Tensor) -> None:
        """Count the sequences and spans of a batch, then remember them."""
        self._sequences.add(span_hashes(ids_BT, ids_BT.shape[1]).flatten().sort().values)
        if (length := span_length(ids_BT)) is not None:
            self._spans.add(span_hashes(ids_BT, length).flatten())

    def add_to(self, readings: Readings) -> None:
        """Add to `readings` the shares of repeated sequences and repeated spans since the last call, and reset the counts."""
        self._sequences.add_to(readings)
        self._spans.add_to(readings)


class _Seen:
    """Measures the share of hashes that have occurred before, by a table of 65,536 hashes in which new overwrite old hashes.

    Args:
        name: name of the metric, which is the share of hashes that have occurred before.
        sampled: one in this many hashes is counted, a power of 2. The choice depends on the tokens alone, so that a copy is
            found at any position. If one in 16 spans is counted, the table reaches back about a million tokens.
    """

    def __init__(self, name: str, sampled: int) -> None:
        self._name, self._sampled = name, sampled
        self._table: Tensor | None = None
        self._seen: Tensor | float = 0.0
        self._all: Tensor | float = 0.0

    def add(self, hashes: Tensor) -> None:
        """Count (N,) hashes, then store them in the table. A hash equal to its predecessor counts as having occurred before."""
        if self._table is None:
            self._table = torch.zeros(_SLOTS + 1, dtype=torch.int64, device=hashes.device)
        sampled = (hashes & (self._sampled - 1)) == 0
        slots = (hashes >> 4) & (_SLOTS - 1)  # bits beside those that choose
        again = (self._table[slots] == hashes) | pad(hashes[1:] == hashes[:-1], (1, 0))
        self._seen = self._seen + (sampled & again).sum()
        self._all = self._all + sampled.sum()
        # Not a boolean index, whose size the host would have to know: other hashes go into a slot that nobody reads.
        self._table.scatter_(0, torch.where(sampled, slots, _SLOTS), hashes)

    def add_to(self, readings: Readings) -> None:
        readings.mean(self._name, self._seen, self._all)
        self._seen = self._all = 0.0


def add_shared_to(readings: Readings, ids_BT: Tensor) -> None:
    """Add to `readings` whether this rank's first sequence equals the first sequence of another rank. A collective."""
    mine = span_hashes(ids_BT[:1], ids_BT.shape[1]).flatten()
    all_ranks = [torch.empty_like(mine) for _ in range(process_count())]
    dist.all_gather(all_ranks, mine)
    readings.mean("health/shared_samples", (torch.cat(all_ranks) == mine).sum() > 1, 1.0)
