"""A byte-level BPE tokenizer whose vocabulary is learned from the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import rustbpe
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lit_llm.core.errors import library_errors
from lit_llm.tokenizers.base import END_OF_TEXT
from lit_llm.tokenizers.bytes import byte_symbols
from lit_llm.tokenizers.learned import Learned
from lit_llm.tokenizers.tiktoken_encoding import GPT2_WORDS

_MOST_BYTES = 2**31 - 1  # rustbpe counts in int32
_TEXT_CHARACTERS = 2**18  # longer texts are cut: rustbpe's regular expression overflows on a run of a million spaces
_WORD_CHARACTERS = 1000  # longer words are cut, because learning takes time with the square of their length
_LONG = re.compile(rf"(?<!\S)\S{{{_WORD_CHARACTERS},}}|(?<!\s)\s{{{_WORD_CHARACTERS},}}")
_BUFFERED_TEXTS = 32  # the number of texts that rustbpe reads at once and counts in parallel, which limits memory


class BPE(Learned):
    """A byte-level BPE with GPT-2's word splitting, trained on the training text when the data is prepared.

    The package rustbpe learns the vocabulary more than twice as fast as ``tokenizers``, and the same vocabulary, except among
    equally frequent pairs. The vocabulary depends only on the counts of words, not on the order of the texts or the number of
    threads. Text beyond the first 2 GiB is not used.

    Args:
        vocab_size: number of ids, including ``<|endoftext|>`` and the 256 bytes. A short text may give fewer ids.
    """

    def __init__(self, vocab_size: int = 4096) -> None:
        super().__init__(vocab_size, holds=f"the 256 bytes and {END_OF_TEXT}", least=257)

    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        trainer = rustbpe.Tokenizer()
        with library_errors("The vocabulary cannot be learned (--data.tokenizer)"):
            trainer.train_from_iterator(_bounded(texts), self.requested_size - 1, _BUFFERED_TEXTS, GPT2_WORDS)
        return _library_tokenizer([bytes(token) for token, _ in trainer.get_mergeable_ranks()])


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        for part in _parts_of(text):
            size += len(part.encode("utf-8", errors="surrogatepass"))
            if size > _MOST_BYTES:
                return
            yield part


def _parts_of(text: str) -> Iterator[str]:
    """Yield the parts of a text, cut so that no part exceeds ``_TEXT_CHARACTERS`` and no word ``_WORD_CHARACTERS``."""
    for start in range(0, len(text), _TEXT_CHARACTERS):
        part, begin = text[start : start + _TEXT_CHARACTERS], 0
        for long in _LONG.finditer(part):
            for cut in range(long.start() + _WORD_CHARACTERS, long.end() + 1, _WORD_CHARACTERS):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def _library_tokenizer(tokens: list[bytes]) -> tokenizers.Tokenizer:
    """A ``tokenizers.Tokenizer`` with the vocabulary ``tokens``: the 256 bytes, then merged tokens in the order of merges."""
    symbols = byte_symbols()
    ranks: dict[bytes, int] = {}
    for token in tokens:
        ranks.setdefault(token, len(ranks))  # two merges can make one token
    names = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merged = [token for token in ranks if len(token) > 1]
    vocab = {name: i for i, name in enumerate([END_OF_TEXT, *sorted(symbols), *(names[token] for token in merged)])}
    merges = [(names[left], names[right]) for left, right in (_parts(token, ranks) for token in merged)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes ``token``: its two parts after all earlier merges (lower ``ranks``) of its bytes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    none = len(ranks)
    pair_ranks = [ranks.get(token[i : i + 2], none) for i in range(len(token) - 1)]  # the rank of each pair's merge
    while len(parts) > 2:
        first = pair_ranks.index(min(pair_ranks))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
        del pair_ranks[first]
        for i in range(max(first - 1, 0), min(first + 1, len(pair_ranks))):
            pair_ranks[i] = ranks.get(parts[i] + parts[i + 1], none)
    return parts[0], parts[1]
