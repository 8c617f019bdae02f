"""A tokenizer with one id per byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lit_llm.tokenizers.base import END_OF_TEXT, Tokenizer


class Bytes(Tokenizer):
    """A tokenizer with one id per byte of UTF-8 (0..255), and id 256 for ``<|endoftext|>``. Lossless, and needs no training."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def eos_id(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8"))

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = self._checked(ids)
        runs = np.split(array, np.flatnonzero(array == self.eos_id))  # each run except the first starts with the special id
        parts = [bytes(run[run < 256].astype(np.uint8)).decode("utf-8", errors="replace") for run in runs]
        return END_OF_TEXT.join(parts)

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], dtype=np.int64)

    def identity(self) -> str:
        return f"bytes{self.class_identity()}"

    def to_json(self) -> str:
        # A byte-level BPE without merges: each byte is its own token.
        alphabet = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return backend.to_str(pretty=True)


def byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte 0..255: the byte's own character if printable, else the next from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 256 + rank for rank, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]
