"""Read documents from Parquet, and from Arrow IPC files and streams. Hugging Face datasets are stored as Arrow streams."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any, BinaryIO

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers.columns import TextColumn
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.messages import MessagesColumn

FILE_START = b"ARROW1\0\0"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_BUFFER_BYTES = 2**20  # bytes of a Parquet file that are read at a time
_ROWS = 128  # rows of a Parquet file in a batch


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """A context manager that turns an error of pyarrow into a sentence about the file ``name``.

    Raises:
        UserError: The file is damaged, or pyarrow is too old for the file.
    """
    pyarrow = need("pyarrow", what="Parquet and Arrow")
    try:
        yield
    except pyarrow.ArrowNotImplementedError as error:
        raise UserError(
            f"{name} has a feature that pyarrow {pyarrow.__version__} does not read: pip install --upgrade pyarrow, "
            "or write the file again."
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: in a column's name
        if isinstance(error, OSError) and error.errno is not None:  # the operating system's own
            raise
        raise UserError(f"{name} is truncated or damaged: copy or download it again.") from error


def _column(schema: Any, of: SourceFile) -> TextColumn:
    return MessagesColumn(schema, of) if of.messages else TextColumn(schema, of)


def is_arrow_stream(head: bytes) -> bool:
    """Whether ``head``, the first bytes of a file, begins like an Arrow IPC stream: with the mark of a message, the length of
    the metadata (a multiple of 8), and an offset within the metadata."""
    length, offset = int.from_bytes(head[4:8], "little"), int.from_bytes(head[8:12], "little")
    return head[:4] == b"\xff\xff\xff\xff" and 0 < length < 2**31 and length % 8 == 0 and 0 < offset < length


def read_arrow(file: BinaryIO, of: SourceFile) -> Iterator[Piece]:
    """Yield the documents of an Arrow file or stream on this machine, one for each row. Memory holds one record batch.

    Raises:
        UserError: pyarrow is not installed; the file is damaged; the column is absent, or holds no text.
    """
    pyarrow = need("pyarrow", what="Arrow")
    ipc = need("pyarrow.ipc", what="Arrow")
    of.fraction = 0.0
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    is_file = mapped[: len(FILE_START)] == FILE_START
    source = pyarrow.BufferReader(mapped)
    open_reader = ipc.open_file if is_file else ipc.open_stream
    with naming_damage(of.name):
        schema = open_reader(source).schema
        column = _column(schema, of)
        source.seek(0)
        fields = sorted({schema.names.index(path[0]) for path in column.paths})
        reader = open_reader(source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield from column.texts(batch)
            of.fraction = source.tell() / source.size()
        if not is_file:
            _require_end(source, of.name)
        of.fraction = 1.0


def _require_end(source: Any, name: str) -> None:
    """Refuse an Arrow stream that lacks its end mark, which pyarrow would accept, or that has data after its end mark."""
    end = source.tell()
    source.seek(max(0, end - len(_STREAM_END)))
    if source.read(len(_STREAM_END)) != _STREAM_END:
        raise UserError(f"{name} is truncated: the end mark of the Arrow stream is missing. Copy or download it again.")
    if end != source.size():
        raise UserError(f"{name} holds data after the end of its Arrow stream: give each stream as a file of its own.")


def read_parquet(file: BinaryIO, of: SourceFile) -> Iterator[Piece]:
    """Yield the documents of a Parquet file, which must be seekable, one for each row.

    Memory holds a batch of rows and one page of the file, not a row group. The program that wrote the file chose the size of a
    page: usually about 1 MiB, but pyarrow puts at least 1,024 rows into a page.

    Raises:
        UserError: pyarrow is not installed; the file is damaged; the column is absent, or holds no text.
    """
    parquet = need("pyarrow.parquet", what="Parquet")
    of.fraction = 0.0
    with naming_damage(of.name):
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        column = _column(table.schema_arrow, of)
        read_rows, rows = 0, table.metadata.num_rows
        names = [".".join(path) for path in column.paths]
        for group in range(table.num_row_groups):  # each may have a dictionary of its own
            for batch in table.iter_batches(_ROWS, row_groups=[group], columns=names, use_threads=False):
                yield from column.texts(batch)
                read_rows += batch.num_rows
                of.fraction = read_rows / rows
        of.fraction = 1.0
