"""Log-likelihoods of texts under the model that is being trained, for the same tokens as lm_eval's model `hf` scores.

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
from .errors import UserError


class Score(NamedTuple):
    """Record of how likely a continuation of a text is under the model."""

    log_likelihood: float
    """Sum of the log-probabilities of the continuation's tokens, in nats."""
    is_greedy: bool
    """Whether each token of the continuation is the model's most likely token at its position."""


Pair = tuple[list[int], list[int]]
"""Token ids of a context, and token ids of its continuation."""


class LogLikelihoods:
    """Scores continuations on all ranks together: every rank must make the same calls, and gets all results.

    The texts are divided among the data-parallel ranks. All ranks run equally many batches: a sharded model needs every rank.

    Args:
        pl_module: a module with the attributes of `contracts.ScoresText`.
        batch_size: largest number of texts in a batch of one rank.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, batch_size: int) -> None:
        self.trainer, self.pl_module, self.batch_size = trainer, pl_module, batch_size
        tokenizer: Any = getattr(pl_module, "exported_tokenizer", None) or pl_module.tokenizer
        self.tokenizer = tokenizer
        self.length: int = pl_module.context_length  # type: ignore[assignment]
        self._prefix = [int(i) for i in getattr(tokenizer, "prefix_token_ids", [])]  # before every text
        bos, eos = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id"))
        self.start_ids = [i for i in (bos, eos) if i is not None][:1]
        """The context of a text without a context: [the BOS id], or else [the EOS id]; [] if the tokenizer has neither."""
        self._start_text = tokenizer.decode(self.start_ids) if self._prefix else ""

    def encode(self, text: str) -> list[int]:
        """The ids of a text. The tokenizer's `prefix_token_ids` come first, unless the text begins with the text of
        `start_ids` (BOS or EOS) already."""
        said = self._start_text and text.startswith(self._start_text)
        return self._plain(text) if said else [*self._prefix, *self._plain(text)]

    def _plain(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text)]

    def pair(self, place: str, context: str, continuation: str) -> Pair:
        """Encode a context and its continuation. White space at the end of the context is encoded with the continuation.

        Args:
            place: task and row of the texts, for the error.

        Raises:
            UserError: `require` refuses the pair.
        """
        if context:
            before = self.encode(context.rstrip())
            pair = before, self.encode(context + continuation)[len(before) :]
        else:
            ids = self._plain(continuation)
            pair = (ids[:1], ids[1:]) if ids[:1] == self.start_ids else (self.start_ids, ids)
        self.require(place, pair, continuation)
        return pair

    def require(self, place: str, pair: Pair, text: str) -> None:
        """Refuse a pair that cannot be scored, as lm_eval's model `hf` does: a continuation without tokens would get score 0.

        Args:
            place: where the pair comes from, for the error: task and row.
            text: the text of the continuation, for the error.

        Raises:
            UserError: the context or the continuation has no token, or the continuation is longer than the model's context.
        """
        context, continuation = pair
        if not context:
            why = "follows no token: its context is empty or white space, and the tokenizer has no token that begins a text"
        elif not continuation:
            why = "has no token of its own: the tokenizer joins it with its context"
        elif len(continuation) > self.length:
            why = f"has {len(continuation)} tokens, but the model reads {self.length}"
        else:
            return
        raise UserError(f"{place}: {text[:80]!r} {why}. Change or remove the row.")

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The score of each pair's continuation. A context that does not fit into the model loses its beginning."""
        texts: dict[tuple[int, ...], list[int]] = {}  # input → its pairs: many differ in the last token only
        for i, (context, continuation) in enumerate(pairs):
            assert context and 0 < len(continuation) <= self.length, "see `require`"
            texts.setdefault(tuple([*context, *continuation][-self.length - 1 : -1]), []).append(i)
        ordered = sorted(texts, key=len, reverse=True)
        rank, ranks = data_parallel(self.trainer)
        own = ordered[rank::ranks]
        sums = np.zeros((len(pairs), 2))  # sum of log-probabilities, number of tokens that are not the likeliest
        for first in range(0, -(-len(ordered) // ranks), self.batch_size):
            batch = own[first : first + self.batch_size]
            logits = self._logits(batch or ordered[-1:])  # a rank that has finished computes with the others
            scored = [
                (row, place, token, i)
                for row, text in enumerate(batch)
                for i in texts[text]
                for place, token in zip(range(len(text))[-len(pairs[i][1]) :], pairs[i][1], strict=True)
            ]
            if not scored:
                continue
            rows, places, targets, owners = torch.tensor(scored, device=logits.device).T  # (M,) each
            chosen = logits[rows, places].float()  # (M, V)
            of_target = chosen.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]  # (M,)
            missed = chosen.argmax(dim=-1) != targets
            for column, values in enumerate((of_target, missed)):
                weights = values.cpu().double().numpy()
                sums[:, column] += np.bincount(owners.cpu().numpy(), weights=weights, minlength=len(sums))
        return [Score(float(total), bool(missed < 0.5)) for total, missed in self._of_all_ranks(sums, ranks)]

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The logits (B, T, V) of B texts (the longest first), padded on the right, which changes nothing in a causal model."""
        ids = np.zeros((len(texts), len(texts[0])), dtype=np.int64)  # the first is the longest
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        with torch.compiler.set_stance("force_eager"):  # every shape would be compiled anew
            logits = self.pl_module(torch.from_numpy(ids).to(self.trainer.strategy.root_device))
        assert isinstance(logits, Tensor)
        return logits

    def _of_all_ranks(self, sums: np.ndarray, ranks: int) -> np.ndarray:
        device = self.trainer.strategy.root_device
        total = torch.from_numpy(sums).to(device, torch.float32 if device.type == "mps" else torch.float64)
        reduced = self.trainer.strategy.reduce(total, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        # Ranks that work on the same texts, as those of tensor parallelism do, have all counted them.
        return (reduced / (self.trainer.world_size // ranks)).cpu().numpy()
