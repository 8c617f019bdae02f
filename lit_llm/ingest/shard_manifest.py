"""``meta.json`` lists the content of a folder of token shards, with a hash of every shard. It is written after the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from lit_llm.core.disk import read_json, write_text
from lit_llm.core.errors import UserError

META_FILE = "meta.json"
FORMAT = 3
"""The format that is written and read. A meta.json without "format" is another program's, and is ignored."""


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard."""

    file: str
    """The name of the shard's file in the folder."""
    tokens: int
    documents: int
    """Number of documents that end in this shard."""
    max_id: int
    """The largest token id in this shard."""
    blake2b: str
    """Hash of the file's bytes after the header; 16 bytes, as hex."""
    mask_blake2b: str | None = None
    """Hash of the file that says which tokens are targets; None without such a file."""
    docs_blake2b: str | None = None
    """Hash of the file with the ends of the documents; None without such a file."""


@dataclass(frozen=True)
class SplitInfo:
    """What the manifest says of one split, such as "train"."""

    documents: int
    bytes: int
    tokens: int
    unknown_tokens: int
    """Tokens that stand for text outside the vocabulary."""
    token_bytes: int
    """Sum of ``Tokenizer.token_bytes`` without the unknown tokens. It may differ from ``bytes`` if a tokenizer changes text."""
    tokens_blake2b: str
    """Hash of all ids as little-endian uint32, which does not depend on the size of the shards; 16 bytes, as hex."""
    shards: tuple[ShardInfo, ...]
    """The split's shards, in the order of their tokens."""
    targets: int | None = None
    """Number of tokens that are targets; None without masks, when every token is a target."""
    mask_blake2b: str | None = None
    """Hash of the masks of all tokens, which does not depend on the size of the shards; None without masks."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``meta.json``."""

    tokenizer: str
    """``Tokenizer.identity()`` of the tokenizer that is saved beside the manifest."""
    vocab_size: int
    bos_id: int | None
    """The id that opens every document; None: no id does."""
    eos_id: int | None
    """The id that ends every document; None: no id does."""
    splits: dict[str, SplitInfo]
    pairs: bool | None = None
    """Whether documents are pairs of a chosen and a rejected answer, one after the other. None: they are not."""

    @property
    def ends_open(self) -> bool:
        """Whether documents end with an id and begin with none, so that the id that ends a document can open the next one."""
        return self.eos_id is not None and self.bos_id is None

    def write(self, folder: Path) -> None:
        """Write ``meta.json``, complete or not at all.

        Raises:
            OSError: the disk is full, or refuses otherwise.
        """
        write_text(folder / META_FILE, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")

    @property
    def shards(self) -> dict[str, ShardInfo]:
        """The shards of all splits, by the names of their files."""
        return {shard.file: shard for split in self.splits.values() for shard in split.shards}

    def split_with(self, files: Sequence[str]) -> SplitInfo | None:
        """The split that consists of exactly the shards ``files``, in this order; None if there is none."""
        return next((split for split in self.splits.values() if [shard.file for shard in split.shards] == files), None)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of ``folder``; None if the folder has none.

        Raises:
            UserError: if the manifest is damaged, cannot be read or has another format.
        """
        path = folder / META_FILE
        try:
            content = read_json(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:
            raise _damaged(path, "it is not JSON") from error
        if not isinstance(content, dict) or "format" not in content:
            return None
        if content["format"] != FORMAT:
            has = f"{path} has format {content['format']}, but this version reads format {FORMAT}"
            raise UserError(f"{has}: prepare the data again, or update lit_llm.")
        try:
            manifest: Manifest = from_json(cls, content)
        except Unexpected as error:
            raise _damaged(path, str(error)) from None
        return manifest


class Unexpected(Exception):
    """A value does not fit its type. The message says which value."""


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged, {what}: restore it, or prepare the data again (python -m lit_llm prepare).")


def from_json(kind: Any, value: Any, key: str = "it") -> Any:
    """Turn ``value``, which is the result of `asdict` and JSON, back into a value of the annotated type ``kind``.

    Args:
        key: the name of the value, for the message.

    Raises:
        Unexpected: ``value`` does not fit ``kind``.
    """
    of = get_args(kind)
    if type(None) in of:
        return None if value is None else from_json(of[0], value, key)
    expected = dict if is_dataclass(kind) else {tuple: list}.get(get_origin(kind), get_origin(kind) or kind)
    if type(value) is not expected or (isinstance(value, int) and value < 0):
        raise Unexpected(f"{key} is {value!r:.80}")
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        return kind(**{name: from_json(hint, value.get(name), name) for name, hint in hints})  # type: ignore[operator]
    if expected is list:
        return get_origin(kind)(from_json(of[0], one, key) for one in value)
    return {name: from_json(of[1], one, name) for name, one in value.items()} if expected is dict else value
