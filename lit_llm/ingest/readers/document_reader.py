"""Open a file of any format and iterate over the pieces of its documents."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from lit_llm.core.disk import naming
from lit_llm.core.errors import UserError
from lit_llm.ingest.open_source import open_source
from lit_llm.ingest.readers.arrow import read_arrow, read_parquet
from lit_llm.ingest.readers.compression import compression_of, decompressed
from lit_llm.ingest.readers.detect import detect, read_head, text_pieces, with_head
from lit_llm.ingest.readers.hub import read_hub
from lit_llm.ingest.readers.interface import Piece, ReadSettings, SourceFile
from lit_llm.ingest.readers.jsonl import read_jsonl
from lit_llm.ingest.readers.plain_text import cut_pieces, read_bytes, read_chunks, without_mark
from lit_llm.ingest.readers.tar import read_tar
from lit_llm.ingest.source import Source


class DocumentReader(contextlib.AbstractContextManager["DocumentReader"]):
    """Reads the documents of a file in pieces. The content decides the format, not the file's name.

    A reader is a context manager, and can be iterated over once. An empty file has no document.

    Args:
        settings: the format and the key of the text.
        start: the first byte to read. Above 0 only for plain text on this machine that is not compressed.
        stop: the byte after the last byte to read. None: the file is read to its end.

    Raises:
        UserError: The file cannot be read, is damaged, has no text, or contradicts ``settings``. Iteration may raise this, too.
    """

    format: str
    """The detected format: text, jsonl, parquet, arrow, tar, or hub for a shard of a dataset of the Hugging Face hub."""

    is_plain_text: bool = False
    """Whether the file is text that is not compressed, so that it can be read in part."""

    def __init__(self, source: Source, settings: ReadSettings, *, start: int = 0, stop: int | None = None) -> None:
        self._source, self._settings = source, settings
        self._of = SourceFile(source.name, settings.text_key, settings.messages)
        self._opened = contextlib.ExitStack()
        with self._opened as opened:
            if source.is_hub:
                self.format = "hub"
                if settings.format != "auto":
                    raise UserError(f"{source.name} is a dataset of the hub, not {settings.format}: use --data.format auto.")
                self._pieces = read_hub(source, self._of)
                return
            self._file = opened.enter_context(open_source(source))
            self._pieces = self._open(start, stop)
            self._opened = opened.pop_all()

    @property
    def position(self) -> int:
        """The number of bytes of the source that have been read, compressed bytes if the source is compressed."""
        if self._of.fraction is None:
            return self._file.tell()
        return round(self._of.fraction * self._source.size)

    @property
    def skipped(self) -> int:
        """The number of documents so far whose text is null or empty."""
        return self._of.skipped

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def _open(self, start: int, stop: int | None) -> Iterator[Piece]:
        """Decide the format, and return an iterator over the pieces of the documents."""
        name = self._source.name
        head = read_head(self._file)
        stream = with_head(head, self._file)
        compression = compression_of(head)
        if compression is not None:
            stream = decompressed(stream, compression, name=name)
            head = read_head(stream)
            stream = with_head(head, stream)
        self.format = self._format(head)
        self.is_plain_text = self.format == "text" and compression is None
        if self._settings.messages and self.format in ("text", "tar") and head:
            raise UserError(f"{name} is {self.format}: conversations are read from JSONL, Parquet and Arrow. Leave it out.")
        if self.format == "text":
            text = self._text(stream, compression, start, stop)
            pieces = cut_pieces(text if start else without_mark(text))
            return pieces if self._settings.format == "text" else text_pieces(pieces, name=name, start=start)
        if self.format == "jsonl":
            can_be_text = self._settings.format == "auto" and not self._settings.messages
            hint = ", or read it as plain text (--data.format text)" if can_be_text else ""
            return read_jsonl(stream, self._of, hint=hint)
        if self.format == "tar":
            return read_tar(stream, self._of)
        seekable = compression is None and self._file.seekable()
        if self.format == "parquet":
            return self._rows(read_parquet, None if seekable else stream)
        return self._rows(read_arrow, None if seekable and self._source.is_local else stream)

    def _rows(self, read: Callable[..., Iterator[Piece]], stream: BinaryIO | None) -> Iterator[Piece]:
        """Yield the documents of a Parquet or Arrow file with ``read``. ``stream``: the content of a file that cannot seek,
        which is copied to a temporary file first; None: the file can seek."""
        file = self._file
        if stream is not None:
            file = cast(BinaryIO, self._opened.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115 - closed with the reader
            for chunk in read_chunks(stream):
                with naming(tempfile.gettempdir()):
                    file.write(chunk)
            file.flush()
        yield from read(file, self._of)

    def _text(self, stream: BinaryIO, compression: str | None, start: int, stop: int | None) -> Iterator[bytes]:
        if stop is None and (compression is not None or not self._source.size):  # a server may not tell the size
            return read_chunks(stream)
        if start:  # only of a file of this machine
            self._file.seek(start)
            stream = self._file
        stop = self._source.size if stop is None else stop
        return read_bytes(stream, stop - start, name=self._source.name)

    def _format(self, head: bytes) -> str:
        wanted = self._settings.format
        if wanted == "text" or not head:
            return "text"
        kind = detect(head, name=self._source.name)
        if wanted == "auto" or kind == wanted:
            return kind
        if wanted == "jsonl" and kind == "text":
            return "jsonl"  # its reader says which line is wrong
        raise UserError(f"{self._source.name} is {kind}, not {wanted}: use --data.format auto.")
