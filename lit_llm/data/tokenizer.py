"""Tokenizers: bytes, characters, a byte-level BPE learned from the data, or any Hugging Face ``tokenizer.json``.

Every tokenizer is saved as a ``tokenizer.json`` with which the ``tokenizers`` library gives the same ids. The characters of
a special token (``<|endoftext|>``) in a text are encoded as ordinary text, never as that token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from lit_llm.disk import write_text
from lit_llm.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")  # GPT-2, LLaMA-2, Gemma, LLaMA-3
TOKENIZER_FILE = "tokenizer.json"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ANY_CHARACTER = r"[\s\S]"


class Tokenizer(ABC):
    """Text to token ids and back. Ids are in [0, vocab_size)."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    @abstractmethod
    def eos_id(self) -> int | None:
        """The id that follows every document, or None if the vocabulary has no such token."""

    @property
    def prefix_token_ids(self) -> list[int]:
        """Ids that the model expects before every text, such as LLaMA's ``<s>``. ``encode`` never adds them."""
        return []

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids (n,) of ``text``. Special tokens are neither recognised nor added."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids, with special tokens by name. Invalid UTF-8 becomes U+FFFD.

        Raises:
            UserError: if an id lies outside [0, vocab_size).
        """

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: bytes of UTF-8 text per id; 0 for special tokens."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of an equivalent ``tokenizer.json``."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """``encode`` of each text; faster where the tokenizer can use several cores."""
        return [self.encode(text) for text in texts]

    def encode_bytes(self, pieces: list[bytes]) -> list[np.ndarray]:
        """``encode_batch`` of raw UTF-8. Invalid UTF-8 becomes U+FFFD, except that ``Bytes`` keeps every byte."""
        return self.encode_batch([piece.decode("utf-8", errors="replace") for piece in pieces])

    def identity(self) -> str:
        """A string that differs if the ids of any text differ; part of the token cache's key."""
        return f"json-{hashlib.sha256(self.to_json().encode()).hexdigest()}"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json`` into ``folder`` and return its path."""
        path = Path(folder) / TOKENIZER_FILE
        write_text(path, self.to_json())
        return path

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)  # (n,)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            bad = array[(array < 0) | (array >= self.vocab_size)][0]
            raise UserError(f"Token id {bad} cannot be decoded: the vocabulary has {self.vocab_size} ids, starting at 0.")
        return array


class Bytes(Tokenizer):
    """One id per byte of UTF-8 (0..255), and 256 for ``<|endoftext|>``. Needs no training and is lossless."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def eos_id(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes([text.encode("utf-8")])[0]

    def encode_bytes(self, pieces: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = self._checked(ids)
        runs = np.split(array, np.flatnonzero(array == self.eos_id))  # each run except the first starts with the special id
        parts = [bytes(run[run < 256].astype(np.uint8)).decode("utf-8", errors="replace") for run in runs]
        return END_OF_TEXT.join(parts)

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], dtype=np.int64)

    def identity(self) -> str:
        return "bytes"

    def to_json(self) -> str:
        # A byte-level BPE without merges: each byte is its own token.
        alphabet = {_byte_symbols()[byte]: byte for byte in range(256)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return backend.to_str(pretty=True)

    @staticmethod
    def matches(content: dict) -> bool:
        """Whether a parsed ``tokenizer.json`` is the one ``Bytes`` writes."""
        model, added = content.get("model", {}), content.get("added_tokens", [])
        return (
            model.get("type") == "BPE"
            and model.get("merges") == []
            and content.get("normalizer") is None
            and content.get("post_processor") is None
            and model.get("vocab") == {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
            and [(token["id"], token["content"]) for token in added] == [(256, END_OF_TEXT)]
        )


class _HuggingFace(Tokenizer):
    """Base of the tokenizers that use the ``tokenizers`` library. Subclasses provide ``_backend``."""

    _backend: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps

    @property
    def eos_id(self) -> int | None:
        found = (self._backend.token_to_id(name) for name in _END_NAMES)
        return next((token for token in found if token is not None), None)

    @property
    def prefix_token_ids(self) -> list[int]:
        encoding = self._backend.encode("a", add_special_tokens=True)  # the mask marks what the post-processor adds
        return encoding.ids[: next((i for i, added in enumerate(encoding.special_tokens_mask) if not added), 0)]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode(self._checked(ids).tolist(), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        content = json.loads(self.to_json())
        added = {token["id"]: token for token in content["added_tokens"]}
        byte_level = '"ByteLevel"' in json.dumps(content["decoder"])
        symbols = set(_byte_symbols())
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for symbol, token in self._backend.get_vocab(with_added_tokens=True).items():
            if token in added:
                sizes[token] = 0 if added[token]["special"] else len(symbol.encode())
            elif byte_level and symbols.issuperset(symbol):
                sizes[token] = len(symbol)  # one character of the byte-level alphabet is one byte
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", symbol):
                sizes[token] = 1  # byte fallback of SentencePiece models
            else:
                sizes[token] = self._bytes_in_context(token)
        return sizes

    def to_json(self) -> str:
        return self._backend.to_str(pretty=True)

    def _bytes_in_context(self, token: int) -> int:
        # Decoders may strip a leading space, so measure the second of two copies of the token.
        once, twice = (self._backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return len(twice.encode()) - len(once.encode())


class Learned(_HuggingFace):
    """A tokenizer whose vocabulary is learned from the training text when the data is prepared.

    Args:
        vocab_size: number of ids. A short text may give fewer.
    """

    def __init__(self, vocab_size: int) -> None:
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

    def identity(self) -> str:
        # Before training the vocabulary is unknown, but it follows from the text, which is part of the cache key.
        return f"{type(self).__name__.lower()}-{self.requested_size}" if self._trained is None else super().identity()


class Characters(Learned):
    """One id per character: the most frequent characters of the training text. All others share one id, U+FFFD.

    Unknown characters are lost: they decode as U+FFFD and count as its three bytes in bits per byte.

    Args:
        vocab_size: number of ids, including U+FFFD (id 0) and ``<|endoftext|>`` (the last id). A short text may give fewer.
    """

    def __init__(self, vocab_size: int = 128) -> None:
        if vocab_size < 3:
            raise UserError(
                f"A vocabulary of {vocab_size} characters cannot hold U+FFFD, {END_OF_TEXT} and a character: "
                "use at least 3 (--data.tokenizer.init_args.vocab_size)."
            )
        super().__init__(vocab_size)

    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        del counts[_UNKNOWN]
        # Ties are broken by the character, so the order of the texts does not matter.
        frequent = sorted(counts, key=lambda character: (-counts[character], character))[: self.requested_size - 2]
        vocab = {character: i for i, character in enumerate([_UNKNOWN, *sorted(frequent)])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=_UNKNOWN))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_ANY_CHARACTER), behavior="isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return backend

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # The library gives the same ids, but takes 154 s for the 12 MB of the standard library instead of less than 1 s.
        codes = (np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32) for text in texts)
        return [self._ids[code] for code in codes]  # (n,) each

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Characters:
        """A tokenizer that was learned and saved earlier."""
        tokenizer = cls(len(backend.get_vocab(with_added_tokens=True)))
        tokenizer._trained = backend
        return tokenizer

    @cached_property
    def _ids(self) -> np.ndarray:
        """(0x110000,) int64: the id of each code point."""
        ids = np.zeros(sys.maxunicode + 1, dtype=np.int64)
        for symbol, i in self._backend.get_vocab(with_added_tokens=False).items():
            ids[ord(symbol)] = i
        return ids

    @staticmethod
    def matches(content: dict) -> bool:
        """Whether a parsed ``tokenizer.json`` is one that ``Characters`` writes."""
        model, added = content.get("model", {}), content.get("added_tokens", [])
        return (
            model.get("type") == "WordLevel"
            and model.get("unk_token") == _UNKNOWN
            and model["vocab"].get(_UNKNOWN) == 0
            and all(len(symbol) == 1 for symbol in model["vocab"])
            and content.get("normalizer") is None
            and (content.get("pre_tokenizer") or {}).get("pattern") == {"Regex": _ANY_CHARACTER}
            and [(token["id"], token["content"]) for token in added] == [(len(model["vocab"]), END_OF_TEXT)]
        )


class BPE(Learned):
    """A byte-level BPE with GPT-2's word splitting, trained on the training text when the data is prepared.

    Args:
        vocab_size: number of ids, including ``<|endoftext|>`` and the 256 bytes. A short text may give fewer.
    """

    def __init__(self, vocab_size: int = 4096) -> None:
        if vocab_size < 257:
            raise UserError(
                f"A BPE vocabulary of {vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}: "
                "use at least 257 (--data.tokenizer.init_args.vocab_size)."
            )
        super().__init__(vocab_size)

    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.requested_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(_byte_symbols()),  # so that every byte has a token, seen in training or not
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        return backend


class TokenizerJSON(_HuggingFace):
    """Any tokenizer of the Hugging Face ``tokenizers`` library.

    Args:
        path: a ``tokenizer.json``, or the folder that contains it.

    Raises:
        UserError: if the file is missing or is not a tokenizer.
    """

    def __init__(self, path: str) -> None:
        self._backend = _read_backend(_tokenizer_file(path))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer saved at ``path`` (a ``tokenizer.json``, or the folder that contains it).

    Raises:
        UserError: if the file is missing or is not a tokenizer.
    """
    file = _tokenizer_file(path)
    tokenizer = TokenizerJSON(str(file))
    content = json.loads(tokenizer.to_json())
    if Bytes.matches(content):
        return Bytes()
    return Characters.of(tokenizer._backend) if Characters.matches(content) else tokenizer


def _tokenizer_file(path: str | os.PathLike[str]) -> Path:
    try:
        file = Path(path).expanduser()
        return file / TOKENIZER_FILE if file.is_dir() else file
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown home folder
        raise UserError(f"Tokenizer {str(path)[:80]!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise UserError(f"Tokenizer not found at {file}: give a tokenizer.json or the folder that contains it.")
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises a bare Exception for invalid files
        raise UserError(f"{file} is not a tokenizer.json that the tokenizers library can read: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # not stored in the file
    return backend


def _byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte 0..255: itself if printable, else the next unused one from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 256 + rank for rank, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]
