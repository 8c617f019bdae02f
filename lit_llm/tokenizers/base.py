"""The interface of tokenizers: the base class that every tokenizer extends."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_llm.core.disk import read_object, write_text
from lit_llm.core.errors import UserError

DOCUMENT_IDS_FILE = "document_ids.json"

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"


class DocumentIds(NamedTuple):
    """Record of the BOS id, which precedes every document, and the EOS id, which follows every document. None: no such id."""

    bos_id: int | None
    eos_id: int | None

    def to_json(self) -> str:
        return json.dumps(self._asdict()) + "\n"

    @classmethod
    def read(cls, folder: Path, vocab_size: int) -> DocumentIds | None:
        """Read the BOS and EOS ids from ``document_ids.json`` in ``folder``; None if there is no such file.

        Raises:
            UserError: if the file is damaged, or an id is not below ``vocab_size``.
        """
        file = folder / DOCUMENT_IDS_FILE
        if not os.path.lexists(file):
            return None
        mend = " (damaged): restore it, or delete it and name the tokens (--data.tokenizer.init_args.eos_token)."
        ids = read_object(file, mend=mend)
        document_ids = cls(ids.pop("bos_id", -1), ids.pop("eos_id", -1))
        if ids or any(i is not None and not (type(i) is int and 0 <= i < vocab_size) for i in document_ids):
            what = f"must be an object with bos_id and eos_id, each null or an id below {vocab_size}"
            raise UserError(f"{file} {what}{mend}")
        return document_ids


class Tokenizer(ABC):
    """Base class of tokenizers, which encode text to token ids in [0, vocab_size), and decode ids to text."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    @abstractmethod
    def eos_id(self) -> int | None:
        """The id that follows every document, or None if the vocabulary has no such token."""

    @property
    def bos_id(self) -> int | None:
        """The id that precedes every document, or None if documents start with their text."""
        return None

    def eos_problem(self) -> str | None:
        """An error message with a remedy if no id ends documents, so that they cannot be separated; None if an id does."""
        if self.eos_id is not None:
            return None
        return f"{type(self).__name__} has no id that ends a document: return one of its ids from eos_id (--data.tokenizer)."

    @property
    def unknown_id(self) -> int | None:
        """The id of all characters outside the vocabulary; None if every text can be encoded without loss."""
        return None

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
        """(vocab_size,) int64: the number of UTF-8 bytes of each id's text; 0 for special tokens."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of a ``tokenizer.json`` that gives the same ids as this tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as from ``encode``. Faster than single calls if the tokenizer can use several cores."""
        return [self.encode(text) for text in texts]

    def encode_bytes(self, text: bytes) -> np.ndarray:
        """Ids (n,) of a text in raw UTF-8. Invalid UTF-8 becomes U+FFFD, except that ``Bytes`` keeps every byte."""
        return self.encode(text.decode("utf-8", errors="replace"))

    def identity(self) -> str:
        """A string for cache keys. The strings of two tokenizers differ if the ids of some text, or BOS or EOS, differ."""
        return f"json-{hashlib.sha256(''.join(self.files().values()).encode()).hexdigest()}{self.class_identity()}"

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether this tokenizer and ``other`` encode every text as the same ids. BOS and EOS may differ."""
        return (self.to_json(), self.class_identity()) == (other.to_json(), other.class_identity())

    def class_identity(self) -> str:
        """The part of ``identity`` about the tokenizer's class: empty for lit_llm's classes. For a user's class, which may
        encode text in any way: its name, the object's attributes that are text or numbers, and a hash of the files that define
        the class and its bases."""
        kind = type(self)
        if kind.__module__.partition(".")[0] == "lit_llm":
            return ""
        code = hashlib.sha256()
        for each in (each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("lit_llm", "abc", "builtins")):
            with contextlib.suppress(OSError, TypeError, KeyError):  # a class without a file or module, as in a session
                code.update(inspect.getsource(sys.modules[each.__module__]).encode())
        plain = {name: value for name, value in vars(self).items() if isinstance(value, str | int | float | None)}
        return f"-{kind.__module__}.{kind.__qualname__}-{json.dumps(plain, sort_keys=True)}-{code.hexdigest()[:16]}"

    def files(self) -> dict[str, str]:
        """File name → content, for the files that ``save`` writes."""
        return {TOKENIZER_FILE: self.to_json(), DOCUMENT_IDS_FILE: DocumentIds(self.bos_id, self.eos_id).to_json()}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json`` and ``document_ids.json`` into ``folder``. Return the path of ``tokenizer.json``."""
        for name, text in self.files().items():
            write_text(Path(folder) / name, text)
        return Path(folder) / TOKENIZER_FILE

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)  # (n,)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            bad = array[(array < 0) | (array >= self.vocab_size)][0]
            raise UserError(f"Token id {bad} cannot be decoded: the vocabulary has {self.vocab_size} ids, starting at 0.")
        return array
