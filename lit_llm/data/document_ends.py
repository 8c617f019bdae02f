"""Where the documents of a stream are: the numbers of the documents in a row, and all documents in order.

An input belongs to the document of its token. Unless documents end with an id and begin with none: then the end of a document
is the first input of the next one, as an opening id would be, and an input belongs to the document of its target.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from lit_llm.core.errors import UserError
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.shard_layout import ShardLayout
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import DOCS_DTYPE

_READ = 512  # ends read at once: a page


def missing_documents(stream: TokenStream) -> str | None:
    """A shard that does not know where its documents end; None if all do."""
    return next((layout.path for layout in stream.layouts if not (layout.megatron or os.path.exists(layout.docs))), None)


class Documents:
    """The documents of a stream whose shards all know where documents end.

    ``.docs`` files are read where they are needed. The ends of Megatron's documents are kept in memory, 8 bytes each.

    Args:
        ends_open: documents end with an id and begin with none.
    """

    def __init__(self, stream: TokenStream, *, ends_open: bool) -> None:
        self.stream, self.ends_open = stream, ends_open
        self._files = OpenFiles()
        self._ends: dict[int, Sequence[int]] = {}  # by shard

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_ends": {}}

    def numbers(self, start: int, length: int) -> np.ndarray:
        """The documents of the inputs [start, start + length): (length,) int32, which begin with 0 and never decrease.

        Raises:
            UserError: the ends are damaged.
        """
        opens = np.zeros(length, dtype=np.int32)
        shift = start + int(self.ends_open)
        opens[self._between(shift, shift + length - 1) - shift] = 1
        return opens.cumsum(dtype=np.int32)

    def pools(self, documents: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All documents with at least one pair of an input and its target, so many at a time. A chosen and a rejected answer,
        which follow each other, count as one.

        Yields:
            (n,) the position of each document's first input, and (n,) its pairs.

        Raises:
            UserError: the ends are damaged.
        """
        waiting = np.empty(0, dtype=np.int64)  # ends
        begin = 0  # of the first document among them
        for layout, offset in zip(self.stream.layouts, self.stream.starts, strict=False):
            ends = layout.document_ends()
            assert ends is not None
            waiting = np.concatenate((waiting, ends.astype(np.int64) + offset))
            while len(waiting) >= documents:
                yield self._pairs(begin, waiting[:documents])
                begin, waiting = int(waiting[documents - 1]), waiting[documents:]
        if begin < len(self.stream):
            if not len(waiting) or waiting[-1] < len(self.stream):
                waiting = np.append(waiting, len(self.stream))  # tokens after the last end are a document too
            yield self._pairs(begin, waiting)

    def _pairs(self, begin: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.stream.pairs:
            ends = ends[1::2]
        starts = np.concatenate(([begin], ends[:-1]))
        if self.ends_open:
            starts = np.maximum(starts - 1, 0)
        lengths = ends - 1 - starts
        return starts[lengths > 0], lengths[lengths > 0]

    def _between(self, above: int, last: int) -> np.ndarray:
        """The ends e of documents with above < e <= last, in tokens of the stream: (n,) int64."""
        starts, found = self.stream.starts, [np.empty(0, dtype=np.int64)]
        shard = bisect_right(starts, above) - 1
        while shard < len(self.stream.layouts) and starts[shard] < last:
            ends, offset = self._of(shard), starts[shard]
            first = _page_of(ends, above - offset, self.stream.layouts[shard].tokens)
            while first < len(ends):
                part = np.asarray(ends[first : first + _READ], dtype=np.int64) + offset
                found.append(part[(part > above) & (part <= last)])
                if part[-1] > last:
                    break
                first += len(part)
            shard += 1
        between = np.concatenate(found)
        if np.any(between[1:] <= between[:-1]):
            raise UserError(
                f"The document ends of {self.stream.layouts[shard - 1].path} are damaged: they do not increase. Prepare the "
                "data again."
            )
        return between

    def _of(self, shard: int) -> Sequence[int]:
        if shard not in self._ends:
            layout = self.stream.layouts[shard]
            ends = layout.document_ends() if layout.megatron else _DocsFile(layout, self._files)
            assert ends is not None
            self._ends[shard] = ends  # type: ignore[assignment]
        return self._ends[shard]


def _page_of(ends: Sequence[int], position: int, tokens: int) -> int:
    """The number of an end at or before the first end above `position`, fewer than `_READ` before it.

    Documents are about equally long everywhere, so the number is interpolated from the position. Every fourth guess halves.
    """
    low, high, low_at, high_at = 0, len(ends), 0, tokens  # the first end above has a number from low to high
    guesses = 0
    while high - low >= _READ:
        guesses += 1
        inside = (high - low) // 2 if guesses % 4 == 0 else (high - low) * (position - low_at) // (high_at - low_at)
        guess = min(max(low + inside - _READ // 2, low), high - _READ)
        page = ends[guess : guess + _READ]
        first, last = int(page[0]), int(page[-1])
        if first > position:
            high, high_at = guess, first
        elif last <= position:
            low, low_at = guess + _READ, last
        else:
            return guess
    return low


class _DocsFile(Sequence[int]):
    """The numbers in a ``.docs`` file, without the file in memory."""

    def __init__(self, layout: ShardLayout, files: OpenFiles) -> None:
        self._path, self._files = layout.docs, files
        try:
            self._count = os.path.getsize(layout.docs) // DOCS_DTYPE.itemsize
        except FileNotFoundError:
            raise UserError(f"{layout.docs} is gone: restore it, and continue the run with --resume auto.") from None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> np.ndarray | int:  # type: ignore[override]
        if isinstance(index, int):
            if index >= self._count:
                raise IndexError(index)
            return int(self._read(index, 1)[0])
        first, end, _ = index.indices(self._count)
        return self._read(first, end - first)

    def _read(self, first: int, count: int) -> np.ndarray:
        size = DOCS_DTYPE.itemsize
        return np.frombuffer(self._files.read(self._path, first * size, count * size, random=True), dtype=DOCS_DTYPE)
