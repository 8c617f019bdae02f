"""One id per character."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from lit_llm.tokenizers.base import END_OF_TEXT
from lit_llm.tokenizers.learned import Learned

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Characters(Learned):
    """One id per character: the most frequent characters of the training text. All others share one id, U+FFFD.

    Unknown characters are lost: they decode as U+FFFD. In bits per byte they count with their own bytes, which are counted
    when the text is tokenised.

    Args:
        vocab_size: number of ids, including U+FFFD (id 0) and ``<|endoftext|>`` (the last id). A short text may give fewer.
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
        """A tokenizer that was learned and saved earlier; None if ``backend`` is another one."""
        vocab = backend.get_vocab(with_added_tokens=False)
        is_ours = vocab.get(_UNKNOWN) == 0 and all(len(symbol) == 1 for symbol in vocab)
        if not is_ours or _library_tokenizer(vocab).to_str() != backend.to_str():
            return None
        tokenizer = cls(len(vocab) + 1)
        tokenizer._trained = backend
        return tokenizer

    @cached_property
    def _ids(self) -> np.ndarray:
        """(0x110000,) int64: the id of each code point."""
        ids = np.zeros(sys.maxunicode + 1, dtype=np.int64)
        for symbol, i in self._backend.get_vocab(with_added_tokens=False).items():
            ids[ord(symbol)] = i
        return ids


def _library_tokenizer(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend
