"""Losses of unigram and bigram models, which a network must beat. Computed on the device, without host synchronisation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import IGNORED, process_count
from .health_readings import Readings

_SLOTS = 2**20
"""Slots of the hash table that counts pairs of an input and its target: 4 MB. Pairs in one slot are counted as one pair."""
_FACTOR = 0x9E3779B1  # odd, near 2^32 / golden ratio: neighbouring numbers fall into slots far apart
PRIOR = 4.0
"""Pseudo-counts of pairs that the bigram model adds for each input, distributed over targets as the unigram model says."""


class CountedText:
    """Computes losses of a unigram and of a bigram model with the counts of earlier batches of this launch on this rank.

    The unigram model predicts targets from their frequencies, the bigram model from their frequencies after the same input.
    Call `judge` with a batch before `add` with it: a model that has already counted the batch would have too low a loss.

    Args:
        vocabulary: V, number of ids that inputs and targets can have.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._targets = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(min(_SLOTS, vocabulary**2), dtype=torch.int32, device=device)

    def add(self, ids: Tensor, targets: Tensor) -> None:
        """Count the input ids and targets, (B, T) each, of a batch."""
        counted, a, b, pair = self._flat(ids, targets)
        # Not a boolean index, whose size the host would have to know: what does not count adds 0.
        for table, at in ((self._targets, b), (self._inputs, a), (self._pairs, pair)):
            table.index_add_(0, at, counted.to(table.dtype))

    def judge(self, ids: Tensor, targets: Tensor, readings: Readings, of: str = "") -> None:
        """Add to `readings` the losses of both models on a batch's input ids and targets, (B, T) each. Counts nothing.

        Args:
            of: beginning of the metrics' names, "validation_" or "". If not "", adds the share of targets never counted, too.
        """
        counted, a, b, pair = self._flat(ids, targets)
        unigram = (self._targets[b] + 1.0) / (self._targets.sum() + self._targets.numel())  # Laplace's rule of succession
        bigram = (self._pairs[pair] + PRIOR * unigram) / (self._inputs[a] + PRIOR)  # Dirichlet: MacKay and Peto 1995
        for name, probability in (("unigram", unigram), ("bigram", bigram)):
            readings.mean(f"health/{of}{name}_loss", -(probability.log() * counted).sum(), counted.sum())
        if of:
            readings.mean(f"health/{of}unseen", ((self._targets[b] == 0) * counted).sum(), counted.sum())

    def add_seen_to(self, readings: Readings, vocabulary: int | None) -> None:
        """Add to `readings` the share of ids that no rank has had as an input, and the largest id that was an input.

        A collective.

        Args:
            vocabulary: number of ids, without the embedding's padding rows. None: the embedding has no padding rows.
        """
        seen = (self._inputs > 0).byte()
        if process_count() > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        seen = seen[:vocabulary]
        readings.mean("health/untouched_embeddings", (seen == 0).sum(), seen.numel())
        readings.largest("health/largest_id", (torch.arange(seen.numel(), device=seen.device) * seen).amax())

    def add_to(self, readings: Readings, unknown: int | None, opening: int | None) -> None:
        """Add to `readings` the number of targets counted so far, and three shares.

        These are the share of the commonest target, of inputs that were never a target, and of inputs that are `unknown`.

        Args:
            unknown: the token id of unknown characters. None: there is no such id, and its share is not added.
            opening: the token id that opens documents, and so is never a target. None: there is no such id.
        """
        readings.mean("health/counted_pairs", self._targets.sum(), 1.0)
        readings.mean("health/commonest_target", self._targets.max(), self._targets.sum())
        unlearned = (self._targets == 0) * self._inputs
        if opening is not None and 0 <= opening < unlearned.numel():
            unlearned[opening] = 0
        readings.mean("health/unlearned_inputs", unlearned.sum(), self._inputs.sum())
        if unknown is not None and 0 <= unknown < self._inputs.numel():
            readings.mean("health/unknown_tokens", self._inputs[unknown], self._inputs.sum())

    def _flat(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return four tensors (B * T,): 1 if the target counts, else 0; the input; the target; the pair's index in `_pairs`."""
        vocabulary = self._targets.numel()
        a, b = (each.flatten().clamp(0, vocabulary - 1).long() for each in (ids, targets))
        pair = a * vocabulary + b
        return (targets != IGNORED).flatten().int(), a, b, pair * _FACTOR % _SLOTS if vocabulary**2 > _SLOTS else pair
