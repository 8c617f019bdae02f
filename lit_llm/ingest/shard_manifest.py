"""The manifest ``meta.json`` of a folder of token shards, which lists all shards with their hashes and is written last."""

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
"""The version of meta.json that is written and read. A meta.json without the key "format" is another program's: ignored."""


@dataclass(frozen=True)
class ShardInfo:
    """Record of one shard in the manifest ``meta.json``: its file, counts and hashes."""

    file: str
    """The name of the shard's file in the folder."""
    tokens: int
    documents: int
    """Number of documents that end in this shard."""
    max_id: int
    """The largest token id in this shard."""
    blake2b: str
    """BLAKE2b hash of the shard file's bytes after the header: 16 bytes, as hex."""
    mask_blake2b: str | None = None
    """BLAKE2b hash of the mask file, which says which tokens are targets; None without a mask file."""
    docs_blake2b: str | None = None
    """BLAKE2b hash of the ``.docs`` file with the ends of the documents; None without a ``.docs`` file."""


@dataclass(frozen=True)
class SplitInfo:
    """Record of one split, such as "train", in the manifest ``meta.json``: its counts, hashes and shards."""

    documents: int
    bytes: int
    tokens: int
    unknown_tokens: int
    """The number of tokens that stand for characters outside the vocabulary."""
    token_bytes: int
    """The sum of ``Tokenizer.token_bytes`` over all tokens but unknown ones. Not ``bytes`` if the tokenizer changes text."""
    tokens_blake2b: str
    """BLAKE2b hash of the split's ids as little-endian uint32, independent of the size of shards: 16 bytes, as hex."""
    shards: tuple[ShardInfo, ...]
    """The split's shards, in the order of their tokens."""
    targets: int | None = None
    """The number of tokens that are targets; None without masks: then every token is a target."""
    mask_blake2b: str | None = None
    """BLAKE2b hash of the masks of all tokens, independent of the size of shards; None without masks."""


@dataclass(frozen=True)
class Manifest:
    """Record of the content of ``meta.json``, which describes a folder of token shards."""

    tokenizer: str
    """``Tokenizer.identity()`` of the tokenizer that is saved beside the manifest."""
    vocab_size: int
    bos_id: int | None
    """The id that opens every document; None: no id does."""
    eos_id: int | None
    """The id that ends every document; None: no id does."""
    splits: dict[str, SplitInfo]
    pairs: bool | None = None
    """Whether documents are preference pairs: a chosen and then a rejected answer. None means no."""

    @property
    def ends_open(self) -> bool:
        """Whether documents end with an EOS id and begin without BOS, so that an EOS can also open the next document."""
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
        """The record of the split that has exactly the shards ``files``, in this order; None if no split has."""
        return next((split for split in self.splits.values() if [shard.file for shard in split.shards] == files), None)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of ``folder``; None if the folder has no manifest of lit_llm.

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
    """The error of `from_json` for a value that does not fit its type. The message names the value."""


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged, {what}: restore it, or prepare the data again (python -m lit_llm prepare).")


def from_json(kind: Any, value: Any, key: str = "it") -> Any:
    """Convert ``value``, read from the JSON of a dataclass's `asdict`, to the annotated type ``kind``, such as the dataclass.

    Args:
        key: the name of ``value``, for the error message.

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
