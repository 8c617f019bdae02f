"""Tokenizers whose vocabulary is learned from the training text."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import whole
from lit_llm.tokenizers.base import END_OF_TEXT, Tokenizer
from lit_llm.tokenizers.hugging_face import HuggingFaceTokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Learned(HuggingFaceTokenizer):
    """Base class of tokenizers whose vocabulary is learned from the training text when the data is prepared.

    Args:
        vocab_size: number of ids. A short text may give fewer ids.
        holds: a phrase for the error message: the tokens that every vocabulary of the class must have.
        least: the smallest allowed ``vocab_size``: the number of these tokens.

    Raises:
        UserError: ``vocab_size`` is below ``least``.
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
    def backend(self) -> tokenizers.Tokenizer:  # type: ignore[override]
        if self._trained is None:
            raise UserError(f"This {type(self).__name__} has not been trained: call train(texts) first.")
        return self._trained

    @property
    def trained(self) -> bool:
        return self._trained is not None

    def train(self, texts: Iterable[str]) -> None:
        """Learn the vocabulary from ``texts``, which are iterated over once. Replaces a vocabulary learned before."""
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

    def same_vocabulary(self, other: Tokenizer) -> bool:
        return self.trained and super().same_vocabulary(other)


class Characters(Learned):
    """A tokenizer with one id for each of the most frequent characters of the training text. Others share the id of U+FFFD.

    Unknown characters are lost: they decode as U+FFFD. Bits per byte use the original number of bytes of unknown characters,
    which is counted when the text is tokenised.

    Args:
        vocab_size: number of ids, with U+FFFD (id 0) and ``<|endoftext|>`` (the last id). A short text may give fewer ids.
    """

    def __init__(self, vocab_size: int = 128) -> None:
        super().__init__(vocab_size, holds=f"U+FFFD, {END_OF_TEXT} and a character", least=3)

    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        del counts[_UNKNOWN]
        # Ties are broken by the character, so the order of the texts does not matter.
        frequent = sorted(counts, key=lambda character: (-counts[character], character))[: self.requested_size - 2]
        return _library_tokenizer({character: i for i, character in enumerate([_UNKNOWN, *sorted(frequent)])})

    @property
    def unknown_id(self) -> int:
        return 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # The library gives the same ids, but takes 154 s for the 12 MB of the standard library instead of less than 1 s.
        codes = (np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32) for text in texts)
        return [self._ids[code] for code in codes]  # (n,) each

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Characters | None:
        """Return the ``Characters`` tokenizer that was saved as ``backend``; None if another tokenizer was saved."""
        vocab = backend.get_vocab(with_added_tokens=False)
        is_ours = vocab.get(_UNKNOWN) == 0 and all(len(symbol) == 1 for symbol in vocab)
        if not is_ours or _library_tokenizer(vocab).to_str() != backend.to_str():
            return None
        tokenizer = cls(len(vocab) + 1)
        tokenizer._trained = backend
        return tokenizer

    @cached_property
    def _ids(self) -> np.ndarray:
        """(0x110000,) int64: the id of each Unicode code point; ``unknown_id`` for code points outside the vocabulary."""
        ids = np.zeros(sys.maxunicode + 1, dtype=np.int64)
        for symbol, i in self.backend.get_vocab(with_added_tokens=False).items():
            ids[ord(symbol)] = i
        return ids


def _library_tokenizer(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend
