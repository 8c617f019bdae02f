"""Find the documents of a stream: the document number of each input of a row, and the position and length of every document.

An input belongs to the document that has its token. The exception is data whose documents end with an id (EOS) and begin with
none (no BOS). In such data, the EOS of a document serves as the first input of the next document, as a BOS would, and each
input belongs to the document that has its target.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from lit_llm.core.errors import UserError
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.shard_layout import ShardLayout
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import DOCS_DTYPE


def missing_documents(stream: TokenStream) -> str | None:
    """The path of the first shard that does not say where its documents end; None if all shards of the stream do."""
    return next((layout.path for layout in stream.layouts if not (layout.megatron or os.path.exists(layout.docs))), None)


class Documents:
    """Finds the documents of a stream whose shards all say where documents end.

    Of ``.docs`` files, only the needed parts are read. The ends of Megatron's documents are kept in memory, 8 bytes each.

    Args:
        ends_open: documents end with an id (EOS) and begin with none, so the EOS of a document opens the next document.
    """

    def __init__(self, stream: TokenStream, *, ends_open: bool) -> None:
        self.stream, self.ends_open = stream, ends_open
        self._files = OpenFiles()
        self._ends: dict[int, _DocsFile | np.ndarray | None] = {}  # number of a shard → its document ends

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_ends": {}}

    def numbers(self, start: int, length: int) -> np.ndarray:
        """The document number of each input at the stream positions [start, start + length): (length,) int32.

        Numbers count from 0 for the document of the first of these inputs.

        Raises:
            UserError: the document ends are damaged.
        """
        opens = np.zeros(length, dtype=np.int32)
        shift = start + int(self.ends_open)
        opens[self._between(shift, shift + length - 1) - shift] = 1
        return opens.cumsum(dtype=np.int32)

    def pools(self, documents: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all documents of the stream in order, in pools of ``documents`` documents; the last pool may be smaller.

        A document that has no pair of an input and its target is left out of its pool. In preference data, a chosen and the
        next rejected answer are yielded as one document, but count as two.

        Yields:
            (n,) the position of each document's first input in the stream, and (n,) each document's number of pairs.

        Raises:
            UserError: the document ends are damaged.
        """
        waiting = np.empty(0, dtype=np.int64)  # ends of the documents that are not yielded yet
        begin = 0  # the position of the first token that is not yielded yet
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
        """The document ends e with above < e <= last, as positions in tokens from the start of the stream: (n,) int64."""
        starts, between = self.stream.starts, [np.empty(0, dtype=np.int64)]
        shard = bisect_right(starts, above) - 1
        while shard < len(self.stream.layouts) and starts[shard] < last:
            ends, offset = self._of(shard), starts[shard]
            first = bisect_right(ends, above - offset)
            end = bisect_right(ends, last - offset, lo=first)
            part = np.asarray(ends[first:end], dtype=np.int64) + offset
            if np.any(part[1:] <= part[:-1]):
                path = self.stream.layouts[shard].path
                raise UserError(f"The document ends of {path} are damaged: they do not increase. Prepare the data again.")
            between.append(part)
            shard += 1
        return np.concatenate(between)

    def _of(self, shard: int) -> Any:
        if shard not in self._ends:
            layout = self.stream.layouts[shard]
            self._ends[shard] = layout.document_ends() if layout.megatron else _DocsFile(layout, self._files)
        return self._ends[shard]


class _DocsFile:
    """The document ends in a ``.docs`` file as a sequence of uint64. Each access reads from the disk."""

    def __init__(self, layout: ShardLayout, files: OpenFiles) -> None:
        self._path, self._files = layout.docs, files
        self._count = os.path.getsize(layout.docs) // DOCS_DTYPE.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int):
            return self[index : index + 1][0]
        first, count, size = index.start, index.stop - index.start, DOCS_DTYPE.itemsize
        return np.frombuffer(self._files.read(self._path, first * size, count * size, random=True), dtype=DOCS_DTYPE)
