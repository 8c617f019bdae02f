"""Log-likelihoods of texts under the model that is being trained, with the tokens that lm_eval scores.

Shape letters: B texts, T positions, V vocabulary, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from ._lightning import data_parallel


class Score(NamedTuple):
    """What the model thinks of a continuation."""

    log_likelihood: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each token is the likeliest one."""


Pair = tuple[list[int], list[int]]
"""Ids of a context and of its continuation."""


class LogLikelihoods:
    """Scores continuations on all ranks together: every rank must make the same calls, and gets all results.

    Data-parallel ranks share the texts. Each runs the same number of batches, because a sharded model needs all ranks.

    Args:
        pl_module: has `tokenizer`, `context_length`, and `forward`, which gives the logits (B, T, V) of ids (B, T).
        batch_size: most texts of a batch on a rank.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, batch_size: int) -> None:
        self.trainer, self.pl_module, self.batch_size = trainer, pl_module, batch_size
        self.tokenizer: Any = pl_module.tokenizer
        self.length: int = pl_module.context_length  # type: ignore[assignment]
        self._prefix = [int(i) for i in getattr(self.tokenizer, "prefix_token_ids", [])]  # before every text

    @property
    def start_id(self) -> int:
        """The id that a text without a context follows."""
        found = [getattr(self.tokenizer, "bos_id", None), *self._prefix, getattr(self.tokenizer, "eos_id", None), 0]
        return next(i for i in found if i is not None)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after those with which every text starts."""
        return [*self._prefix, *self._plain(text)]

    def _plain(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text)]

    def pair(self, context: str, continuation: str) -> Pair:
        """Ids of both. White space at the end of the context belongs to the continuation, where tokens begin with it."""
        if not context:
            ids = self._plain(continuation)
            return (ids[:1], ids[1:]) if ids[:1] == [self.start_id] else ([self.start_id], ids)
        kept = context.rstrip()
        before = self.encode(kept)
        return before or [self.start_id], self.encode(context + continuation)[len(before) :]

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The score of each continuation. What does not fit into the model is cut off on the left."""
        texts: dict[tuple[int, ...], list[int]] = {}  # input → its pairs: many differ in the last token only
        for i, (context, continuation) in enumerate(pairs):
            if continuation:
                texts.setdefault(tuple([*context, *continuation][-self.length - 1 : -1]), []).append(i)
        ordered = sorted(texts, key=len, reverse=True)
        rank, ranks = data_parallel(self.trainer)
        own = ordered[rank::ranks]
        found = np.zeros((len(pairs), 2))  # sum of log-probabilities, number of tokens that are not the likeliest
        for first in range(0, -(-len(ordered) // ranks), self.batch_size):
            batch = own[first : first + self.batch_size]
            logits = self._logits(batch or ordered[-1:])  # a rank that has finished computes with the others
            scored = [
                (row, place, token, i)
                for row, text in enumerate(batch)
                for i in texts[text]
                for tokens in [pairs[i][1][-self.length :]]
                for place, token in zip(range(len(text))[-len(tokens) :], tokens, strict=True)
            ]
            if not scored:
                continue
            rows, places, targets, owners = torch.tensor(scored, device=logits.device).T  # (M,) each
            chosen = logits[rows, places].float()  # (M, V)
            of_target = chosen.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]  # (M,)
            missed = chosen.argmax(dim=-1) != targets
            for column, values in enumerate((of_target, missed)):
                weights = values.cpu().double().numpy()
                found[:, column] += np.bincount(owners.cpu().numpy(), weights=weights, minlength=len(found))
        return [Score(float(total), bool(missed < 0.5)) for total, missed in self._of_all_ranks(found, ranks)]

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, T, V). The model is causal, so padding on the right changes nothing."""
        ids = np.zeros((len(texts), len(texts[0])), dtype=np.int64)  # the first is the longest
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        with torch.compiler.set_stance("force_eager"):  # every shape would be compiled anew
            logits = self.pl_module(torch.from_numpy(ids).to(self.trainer.strategy.root_device))
        assert isinstance(logits, Tensor)
        return logits

    def _of_all_ranks(self, found: np.ndarray, ranks: int) -> np.ndarray:
        device = self.trainer.strategy.root_device
        total = torch.from_numpy(found).to(device, torch.float32 if device.type == "mps" else torch.float64)
        reduced = self.trainer.strategy.reduce(total, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        # Ranks that work on the same texts, as those of tensor parallelism do, have all counted them.
        return (reduced / (self.trainer.world_size // ranks)).cpu().numpy()
