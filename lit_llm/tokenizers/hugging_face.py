"""Any tokenizer of the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from lit_llm.errors import UserError
from lit_llm.tokenizers.base import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from lit_llm.tokenizers.bytes import byte_symbols

_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")  # GPT-2, LLaMA-2, Gemma, LLaMA-3


class HuggingFaceTokenizer(Tokenizer):
    """Base of the tokenizers that use the ``tokenizers`` library. Subclasses provide ``_backend``."""

    _backend: tokenizers.Tokenizer

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library."""
        return self._backend

    @property
    def encodes_with_library(self) -> bool:
        """Whether the ids are those of ``backend``: False if a subclass encodes in another way."""
        own, base = type(self), HuggingFaceTokenizer
        return (own.encode, own.encode_batch, own.encode_bytes) == (base.encode, base.encode_batch, base.encode_bytes)

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
        symbols = set(byte_symbols())
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


class TokenizerJSON(HuggingFaceTokenizer):
    """Any tokenizer of the Hugging Face ``tokenizers`` library.

    Args:
        path: a ``tokenizer.json``, or the folder that contains it.

    Raises:
        UserError: if the file is missing or is not a tokenizer.
    """

    def __init__(self, path: str) -> None:
        self._backend = _read_backend(tokenizer_file(path))


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
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
