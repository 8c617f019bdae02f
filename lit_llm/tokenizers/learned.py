"""Tokenizers whose vocabulary is learned from the training text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated

import tokenizers

from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import whole
from lit_llm.tokenizers.base import END_OF_TEXT
from lit_llm.tokenizers.hugging_face import HuggingFaceTokenizer


class Learned(HuggingFaceTokenizer):
    """A tokenizer whose vocabulary is learned from the training text when the data is prepared.

    Args:
        vocab_size: number of ids. A short text may give fewer.
        holds: what every vocabulary of the class has.
        least: how many ids that takes.

    Raises:
        UserError: ``vocab_size`` is smaller.
    """

    def __init__(self, vocab_size: Annotated[int, whole(1, 100_000_000)], *, holds: str = END_OF_TEXT, least: int = 1) -> None:
        if vocab_size < least:
            raise UserError(
                f"A vocabulary of {vocab_size} cannot hold {holds}: use at least {least} "
                "(--data.tokenizer.init_args.vocab_size)."
            )
        self.requested_size = vocab_size
        self._trained: tokenizers.Tokenizer | None = None

    @property
    def _backend(self) -> tokenizers.Tokenizer:  # type: ignore[override]
        if self._trained is None:
            raise UserError(f"This {type(self).__name__} has not been trained: call train(texts) first.")
        return self._trained

    @property
    def trained(self) -> bool:
        return self._trained is not None

    def train(self, texts: Iterable[str]) -> None:
        """Learn the vocabulary from ``texts``, read once, piece by piece."""
        backend = self._learn(texts)
        backend.encode_special_tokens = True
        self._trained = backend

    @abstractmethod
    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer: ...

    def eos_problem(self) -> None:
        return None  # known before training: every learned vocabulary has an end of document

    def identity(self) -> str:
        # Before training the vocabulary is unknown, but it follows from the text, which is part of the cache key.
        if self._trained is not None:
            return super().identity()
        return f"{type(self).__name__.lower()}-{self.requested_size}{self.class_identity()}"
