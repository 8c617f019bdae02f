"""The loss of models that only count tokens: what a network must beat. On the device, without waiting for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import IGNORED, process_count
from .health_readings import Readings

_SLOTS = 2**20
"""Pairs of an input and its target that are counted: 4 MB. Pairs that share a slot count as one, and so seem likelier."""
_FACTOR = 0x9E3779B1  # odd, near 2^32 / golden ratio: neighbouring numbers fall into slots far apart
PRIOR = 4.0
"""Pairs that an input is given beforehand, spread as the targets are."""


class CountedText:
    """Losses of a unigram and of a bigram model with the counts of earlier batches of this launch on this rank.

    The unigram model knows how often each target occurs, the bigram model also the input at its place. Both are judged on text
    that they have not counted, so that they do not flatter themselves, however large the vocabulary is.

    Args:
        vocabulary: V, ids of inputs and targets.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._targets = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(min(_SLOTS, vocabulary**2), dtype=torch.int32, device=device)

    def add(self, ids: Tensor, targets: Tensor) -> None:
        """Count (B, T) ids and targets."""
        counted, a, b, pair = self._flat(ids, targets)
        # Not a boolean index, whose size the host would have to know: what does not count adds 0.
        for table, at in ((self._targets, b), (self._inputs, a), (self._pairs, pair)):
            table.index_add_(0, at, counted.to(table.dtype))

    def judge(self, ids: Tensor, targets: Tensor, readings: Readings, of: str = "") -> None:
        """Add the losses on (B, T) ids and targets.

        Args:
            of: before the names of the losses.
        """
        counted, a, b, pair = self._flat(ids, targets)
        unigram = (self._targets[b] + 1.0) / (self._targets.sum() + self._targets.numel())  # Laplace's rule of succession
        bigram = (self._pairs[pair] + PRIOR * unigram) / (self._inputs[a] + PRIOR)  # Dirichlet: MacKay and Peto 1995
        for name, probability in (("unigram", unigram), ("bigram", bigram)):
            readings.mean(f"health/{of}{name}_loss", -(probability.log() * counted).sum(), counted.sum())
        if of:
            readings.mean(f"health/{of}unseen", ((self._targets[b] == 0) * counted).sum(), counted.sum())

    def add_seen_to(self, readings: Readings, vocabulary: int | None) -> None:
        """Add the share of ids that were no input on any rank, and the largest that was one. A collective.

        Args:
            vocabulary: ids from it on are padding.
        """
        seen = (self._inputs > 0).byte()
        if process_count() > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        seen = seen[:vocabulary]
        readings.mean("health/untouched_embeddings", (seen == 0).sum(), seen.numel())
        readings.largest("health/largest_id", (torch.arange(seen.numel(), device=seen.device) * seen).amax())

    def add_to(self, readings: Readings, unknown: int | None, opening: int | None) -> None:
        """Add how many targets were counted so far, and shares of tokens.

        Args:
            unknown: the id of unknown characters.
            opening: the id that opens documents, which is no target.
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
        """(N,) each: 1 if the target counts, input, target, and the slot of the pair."""
        vocabulary = self._targets.numel()
        a, b = (each.flatten().clamp(0, vocabulary - 1).long() for each in (ids, targets))
        pair = a * vocabulary + b
        return (targets != IGNORED).flatten().int(), a, b, pair * _FACTOR % _SLOTS if vocabulary**2 > _SLOTS else pair
