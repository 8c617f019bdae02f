"""Any tokenizer of the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lit_llm.core.disk import read_object, read_text
from lit_llm.core.errors import UserError, library_errors
from lit_llm.tokenizers.base import END_OF_TEXT, TOKENIZER_FILE, DocumentIds, Tokenizer
from lit_llm.tokenizers.bytes import byte_symbols

_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")  # GPT-2, LLaMA-2, Gemma, LLaMA-3
TOKENIZER_CONFIG = "tokenizer_config.json"
_RANDOM = {"dropout", "alpha", "nbest_size"}
"""The names of settings of a BPE or a Unigram model that make the tokens of a text random."""
_SHOWN = 12  # the most special tokens that a message lists


class HuggingFaceTokenizer(Tokenizer):
    """Base class of tokenizers that use the ``tokenizers`` library. A subclass sets ``backend``, an object of the library."""

    backend: tokenizers.Tokenizer

    @property
    def encodes_with_library(self) -> bool:
        """Whether ``backend`` encodes all texts. False if a subclass has its own method to encode."""
        own, base = type(self), HuggingFaceTokenizer
        return (own.encode, own.encode_batch, own.encode_bytes) == (base.encode, base.encode_batch, base.encode_bytes)

    @property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps

    @property
    def eos_id(self) -> int | None:
        return _first_known(self.backend, _END_NAMES)

    @property
    def prefix_token_ids(self) -> list[int]:
        with library_errors("The tokenizer cannot encode a text"):
            encoding = self.backend.encode("a", add_special_tokens=True)  # the mask marks what the post-processor adds
        return encoding.ids[: next((i for i, added in enumerate(encoding.special_tokens_mask) if not added), 0)]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with library_errors("The tokenizer cannot encode a text"):
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with library_errors("The tokenizer cannot decode ids"):
            return self.backend.decode(self._checked(ids).tolist(), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        content = json.loads(self.to_json())
        added = {token["id"]: token for token in content["added_tokens"]}
        byte_level = '"ByteLevel"' in json.dumps(content["decoder"])
        symbols = set(byte_symbols())
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for symbol, token in self.backend.get_vocab(with_added_tokens=True).items():
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
        return self.backend.to_str(pretty=True)

    def _bytes_in_context(self, token: int) -> int:
        # Decoders may strip a leading space, so measure the second of two copies of the token.
        once, twice = (self.backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return len(twice.encode()) - len(once.encode())


class TokenizerJSON(HuggingFaceTokenizer):
    """Any tokenizer of the Hugging Face ``tokenizers`` library.

    Args:
        path: a ``tokenizer.json``, or the folder that contains it.
        eos_token: the token that follows every document. None: the token in ``document_ids.json`` beside the file, else
            ``<|endoftext|>``, ``</s>``, ``<eos>`` or ``<|end_of_text|>``, else the ``eos_token`` of a
            ``tokenizer_config.json`` or ``special_tokens_map.json`` beside the file. These files come last, because the
            ``eos_token`` of a chat model ends a turn, not a document.
        bos_token: a token that precedes every document and every prompt. None: the token in ``document_ids.json``, else no
            token.

    Raises:
        UserError: if the file is missing or is not a tokenizer, or a token is not in the vocabulary.
    """

    def __init__(self, path: str, eos_token: str | None = None, bos_token: str | None = None) -> None:
        self._file = tokenizer_file(path)
        self.backend = _read_backend(self._file)
        self.named = [name for name, token in (("bos_id", bos_token), ("eos_id", eos_token)) if token is not None]
        saved = DocumentIds.read(self._file.parent, self.vocab_size)
        self._bos_id = None if saved is None else saved.bos_id
        self._eos_id = self._found_eos() if saved is None else saved.eos_id
        if eos_token is not None:
            self._eos_id = self._id_of(eos_token, "eos_token")
        if bos_token is not None:
            self._bos_id = self._id_of(bos_token, "bos_token")

    @property
    def folder(self) -> Path:
        """The folder of ``tokenizer.json``, which may have other files of the tokenizer too, such as a chat template."""
        return self._file.parent

    @property
    def eos_id(self) -> int | None:
        return self._eos_id

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    def eos_problem(self) -> str | None:
        if self.eos_id is not None:
            return None
        return (
            f"{self._file} does not say which token ends a document: name one of its special tokens, {self._special_tokens()} "
            "(--data.tokenizer.init_args.eos_token)."
        )

    def _found_eos(self) -> int | None:
        known = _first_known(self.backend, _END_NAMES)
        return _first_known(self.backend, configured_tokens(self._file.parent, "eos_token")) if known is None else known

    def _id_of(self, token: str, argument: str) -> int:
        token_id: int | None = self.backend.token_to_id(token)
        if token_id is None:
            raise UserError(
                f"{argument} is {token!r}, but {self._file} has no such token: its special tokens are "
                f"{self._special_tokens()} (--data.tokenizer.init_args.{argument})."
            )
        return token_id

    def _special_tokens(self) -> str:
        added = self.backend.get_added_tokens_decoder()
        names = [str(added[i].content) for i in sorted(added) if added[i].special]
        more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        return ", ".join([*names[:_SHOWN], *more]) or "of which there are none"


def _first_known(backend: tokenizers.Tokenizer, names: Iterable[str]) -> int | None:
    ids = (backend.token_to_id(name) for name in names)
    return next((token for token in ids if token is not None), None)


def optional_object(file: Path) -> dict[str, Any]:
    """The object in ``file``, a JSON file beside tokenizer.json; {} if the file is missing or damaged."""
    with contextlib.suppress(UserError):
        return read_object(file)
    return {}


def configured_tokens(folder: Path, name: str) -> list[str]:
    """The texts (at most two) of the token ``name``, as "eos_token", in tokenizer_config.json and special_tokens_map.json."""
    entries = [optional_object(folder / file).get(name) for file in (TOKENIZER_CONFIG, "special_tokens_map.json")]
    tokens = [token.get("content") if isinstance(token, dict) else token for token in entries]
    return [token for token in tokens if isinstance(token, str)]


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    file = Path(os.path.expanduser(path))  # an unknown home folder stays as it is
    return file / TOKENIZER_FILE if os.path.isdir(file) else file


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not os.path.isfile(file):
        raise UserError(f"Tokenizer not found at {str(file)[:200]}: give a tokenizer.json or the folder that contains it.")
    with library_errors(f"{file} is not a tokenizer.json that the tokenizers library can read"):
        backend = tokenizers.Tokenizer.from_str(read_text(file))
    if not backend.get_vocab(with_added_tokens=True):
        raise UserError(f"{file} has no tokens.")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # not stored in the file
    for name in _RANDOM & set(dir(backend.model)):
        setattr(backend.model, name, None)
    return backend
