"""Read the tokens of several files as one stream."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.data.megatron import index_of, wrong_size
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.shard_layout import ShardLayout, read_layout, size_of
from lit_llm.data.stored_files import StoredFile
from lit_llm.ingest.shard_manifest import Manifest, ShardInfo
from lit_llm.ingest.shards import DOCS_DTYPE, HASH_BYTES, HEADER_BYTES, LAYOUTS, header, magic_for

FULL_SCAN_TOKENS = 64_000_000  # scan() reads a stream of up to so many tokens in full, in a fraction of a second
WINDOW_TOKENS, WINDOWS = 2**16, 1024  # scan() reads this many windows of a longer stream


class TokenStream:
    """Reads the tokens of several files as one stream. ``shard_layout`` describes the formats of the files.

    Files are opened when they are read, few at a time. Pickling (to a data worker) transfers names and sizes of the files only.

    Raises:
        UserError: one sentence for each file that is missing, empty, truncated, or not a shard.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, headerless: bool = False) -> None:
        assert paths, "a stream needs at least one file"
        layouts: list[ShardLayout] = []
        problems: list[str] = []
        for path in paths:
            with noting(problems):
                layouts.append(read_layout(os.fspath(path), headerless=headerless))
        masked = [layout.path for layout in layouts if layout.masked]
        if masked and len(masked) < len(layouts):
            without = next(layout for layout in layouts if not layout.masked)
            problems.append(f"{masked[0]} has a mask, but {without.path} has none: prepare the data again.")
        refuse(problems)
        self._use(layouts)

    @classmethod
    def listed(cls, folder: Path, manifest: Manifest, files: Sequence[str]) -> TokenStream:
        """Make a stream of shards that a manifest lists. No file is opened, but each file must have the size in the manifest.

        Args:
            folder: where the manifest and the shards are.
            files: the names of the shards, in the order of their tokens.

        Raises:
            UserError: one sentence for each file that is missing or has another size. Or documents are preference pairs, and
                ``files`` are not all shards of a split.
        """
        assert files, "a stream needs at least one file"
        known, whole = manifest.shards, manifest.split_with(files)
        shards = [known[file] for file in files]
        if manifest.pairs and whole is None:
            raise UserError(f"{folder} has pairs, which can lie in two shards: name all shards of a split, or the folder.")
        magic = magic_for(manifest.vocab_size)
        dtype = LAYOUTS[magic][1]
        layouts = [
            ShardLayout(os.path.join(folder, s.file), dtype, HEADER_BYTES, s.tokens, masked=s.mask_blake2b is not None)
            for s in shards
        ]
        problems = [
            _size_problem(layout) or _docs_problem(layout, s.documents) for layout, s in zip(layouts, shards, strict=True)
        ]
        refuse(problem for problem in problems if problem is not None)
        stream = cls.__new__(cls)
        stream._use(layouts)
        stream._listed, stream._magic = shards, magic
        if whole is not None:
            stream._hash = whole.tokens_blake2b
            if whole.mask_blake2b is not None:  # one hash of both
                both = f"{whole.tokens_blake2b} {whole.mask_blake2b}"
                stream._hash = hashlib.blake2b(both.encode(), digest_size=HASH_BYTES).hexdigest()
        stream.folder_of_manifest, stream.ends_open = folder, manifest.ends_open
        stream.pairs = bool(manifest.pairs)
        return stream

    def _use(self, layouts: list[ShardLayout]) -> None:
        self.layouts = layouts
        self.starts = [0, *accumulate(layout.tokens for layout in layouts)]
        """The position of each shard's first token in the stream; then the number of all tokens."""
        self._files = OpenFiles()
        self.mend = "restore it, or prepare the data again"  # what a user does about a file that has changed
        self._listed: list[ShardInfo] | None = None  # the manifest's record of each shard; None: no manifest lists the shards
        self._magic = 0  # the magic number with which a listed shard begins
        self._hash: str | None = None  # the hash of all tokens and masks; None: no manifest has it
        self.folder_of_manifest: Path | None = None
        self.ends_open: bool | None = None  # as a manifest says: see `Manifest.ends_open`
        self.pairs = False  # as a manifest says: see `Manifest.pairs`

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def paths(self) -> list[Path]:
        return [Path(layout.path) for layout in self.layouts]

    def files(self) -> Iterator[StoredFile]:
        """Yield the files with the stream's tokens, masks and document ends, each with its hash if a manifest has the hash."""
        for number, layout in enumerate(self.layouts):
            tokens = mask = ends = None
            head = b""
            if self._listed is not None:
                listed = self._listed[number]
                tokens, mask, ends = listed.blake2b, listed.mask_blake2b, listed.docs_blake2b
                head = header(self._magic, layout.tokens)
            yield StoredFile(layout.path, tokens, head, self.mend)
            if layout.masked:
                yield StoredFile(layout.mask_path, mask, mend=self.mend)
            docs = index_of(layout.path) if layout.megatron else layout.docs
            if os.path.exists(docs):
                yield StoredFile(docs, ends, mend=self.mend)

    @property
    def itemsize(self) -> int:
        """The number of bytes of a token id in the first shard."""
        return self.layouts[0].dtype.itemsize

    @property
    def masked(self) -> bool:
        """Whether the shards have mask files, which say which tokens are targets of the loss."""
        return self.layouts[0].masked

    def read(self, start: int, length: int, *, random: bool = False) -> np.ndarray:
        """Read the tokens [start, start + length): unsigned integers (length,); a read-only array if they lie in one shard.

        Args:
            random: True: the next read is elsewhere, so the kernel is told not to read ahead.

        Raises:
            UserError: a file is gone or became shorter, or a token id is negative.
        """
        parts = [self._read(*place, random) for place in self.places(start, length)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    def read_mask(self, start: int, length: int, *, random: bool = False) -> np.ndarray | None:
        """Read the mask of the tokens [start, start + length): uint8 (length,), 1 for targets, else 0. None: no masks.

        Raises:
            UserError: a mask file is gone or became shorter.
        """
        if not self.masked:
            return None
        places = self.places(start, length)
        parts = [self._files.read(self.layouts[shard].mask_path, first, count, random=random) for shard, first, count in places]
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def places(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for each shard with some of the tokens [start, start + length): (number of the shard, position of the first of
        these tokens within the shard, number of these tokens in the shard)."""
        shard = bisect_right(self.starts, start) - 1
        while length:
            first = start - self.starts[shard]
            count = min(length, self.layouts[shard].tokens - first)
            yield shard, first, count
            start, length, shard = start + count, length - count, shard + 1

    def scan(self, vocab_size: int) -> str:
        """Check token ids against the vocabulary and return a hash of the content (hex).

        If a manifest has the largest id and the hash, no tokens are read. Otherwise a stream of up to 64 million tokens is read
        in full. Of a longer stream, 1,024 evenly spaced windows of 65,536 tokens are read: enough to distinguish datasets. The
        ids of every batch are checked again when the batch is read.

        Raises:
            UserError: a token is outside the vocabulary; the message names its shard and id.
        """
        if self._listed is not None and self._hash is not None:
            largest = max(self._listed, key=lambda shard: shard.max_id)
            if largest.max_id >= vocab_size:
                path = self.layouts[self._listed.index(largest)].path
                rule = f"the vocabulary has {vocab_size} ids, starting at 0 (--data.vocab_size)"
                raise UserError(f"{path} holds token id {largest.max_id}, but {rule}.")
            return self._hash
        window = WINDOW_TOKENS
        starts = np.arange(0, len(self), window)
        if len(self) > FULL_SCAN_TOKENS:
            starts = np.linspace(0, len(self) - window, WINDOWS).astype(np.int64)
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for start in starts.tolist():
            tokens = self.read(start, min(window, len(self) - start))
            if tokens.max() >= vocab_size:
                raise self.bad_token(start + int(np.argmax(tokens >= vocab_size)), vocab_size)
            digest.update(tokens.astype("<u4").tobytes())  # the hash does not depend on how ids are stored
            if (mask := self.read_mask(start, tokens.size)) is not None:
                digest.update(mask.tobytes())
        return digest.hexdigest()

    def bad_token(self, position: int, vocab_size: int) -> UserError:
        """Return the error that says that the token at ``position`` in the stream has an id outside the vocabulary."""
        shard = bisect_right(self.starts, position) - 1
        return UserError(
            f"{self.layouts[shard].path} holds token id {int(self.read(position, 1)[0])} at position "
            f"{position - self.starts[shard]}, but the vocabulary has {vocab_size} ids, starting at 0 (--data.vocab_size)."
        )

    def _read(self, shard: int, first: int, length: int, random: bool) -> np.ndarray:
        """Read the tokens [first, first + length) of shard number ``shard``: unsigned integers (length,)."""
        path, dtype, offset, *_ = self.layouts[shard]
        content = self._files.read(path, offset + first * dtype.itemsize, length * dtype.itemsize, random=random)
        tokens = np.frombuffer(content, dtype=dtype)
        if dtype.kind == "i":
            if tokens.min() < 0:
                position = int(np.argmax(tokens < 0))
                raise UserError(
                    f"{path} holds token id {tokens[position]} at position {first + position}: token ids start at 0. Tokenise "
                    "the data again."
                )
            tokens = tokens.view(f"<u{dtype.itemsize}")
        return tokens


def _docs_problem(layout: ShardLayout, documents: int) -> str | None:
    """A sentence if a shard's ``.docs`` file does not have the size for ``documents`` ends; None if it has, or is missing."""
    size, expected = size_of(layout.docs), documents * DOCS_DTYPE.itemsize
    if size in (None, expected):
        return None
    says = f"meta.json says {documents} documents = {expected} bytes"
    return f"{layout.docs} has {size} bytes, but {says}: restore it, or prepare the data again."


def _size_problem(layout: ShardLayout) -> str | None:
    """A sentence if a shard's file or mask is missing or does not have the size in the manifest; None if both are right."""
    if (size := size_of(layout.path)) is None:
        return f"Token shard not found: {layout.path}."
    says = f"meta.json says {layout.tokens} tokens = {layout.size} bytes"
    if problem := wrong_size(layout.path, size, layout.size, says):
        return f"{problem} Restore it, or prepare the data again."
    return layout.mask_problem() if layout.masked else None
