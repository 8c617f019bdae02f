"""Parquet, and Arrow IPC: files and streams. Hugging Face datasets are kept as Arrow streams."""

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
_MOST_MAPPED_BYTES = 2**24  # of text, until the pages behind it are given back

_BUFFER_BYTES = 2**20  # of the file, read at a time
_BATCH_BYTES = 2**20  # of text, on average
_MOST_ROWS = 1000  # in a batch: texts that are stored once may be large


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turn an error of pyarrow into a sentence about the file ``name``.

    Raises:
        UserError: The file is damaged, or pyarrow is too old for it.
    """
    pyarrow = need("pyarrow", what="Parquet and Arrow")
    try:
        yield
    except pyarrow.ArrowNotImplementedError as error:
        raise UserError(
            f"{name} has a feature that pyarrow {pyarrow.__version__} does not read: pip install --upgrade pyarrow, "
            "or write the file again."
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of the name of a column
        if isinstance(error, OSError) and error.errno is not None:  # the operating system's own
            raise
        raise UserError(f"{name} is truncated or damaged: copy or download it again.") from error


def _column(schema: Any, of: SourceFile) -> TextColumn:
    return MessagesColumn(schema, of) if of.messages else TextColumn(schema, of)


def is_arrow_stream(head: bytes) -> bool:
    """Whether ``head`` starts with a message: a mark, the length of the metadata, a multiple of 8, and a table's offset."""
    length, offset = int.from_bytes(head[4:8], "little"), int.from_bytes(head[8:12], "little")
    return head[:4] == b"\xff\xff\xff\xff" and 0 < length < 2**31 and length % 8 == 0 and 0 < offset < length


def read_arrow(file: BinaryIO, of: SourceFile) -> Iterator[Piece]:
    """The documents of a file on this machine. Each row is one.

    The file is mapped, so a record batch is not copied, whatever its size. The text column of one batch is in memory if
    the batch is compressed, or if its texts are given by a dictionary.

    Raises:
        UserError: pyarrow is not installed; the file is damaged; the column is absent, or holds no text.
    """
    pyarrow = need("pyarrow", what="Arrow")
    ipc = need("pyarrow.ipc", what="Arrow")
    of.fraction = 0.0
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with naming_damage(of.name):
        # A file is a stream after a mark, with a directory behind it. pyarrow copies the batches of a file, not of a stream.
        is_file = mapped[: len(FILE_START)] == FILE_START
        expected = ipc.open_file(pyarrow.BufferReader(mapped)).num_record_batches if is_file else None
        source = pyarrow.BufferReader(mapped)
        begin = len(FILE_START) if is_file else 0
        source.seek(begin)
        schema = ipc.open_stream(source).schema
        column = _column(schema, of)
        source.seek(begin)
        fields = sorted({schema.names.index(path[0]) for path in column.paths})
        options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        batches, used = 0, 0
        for batch in ipc.open_stream(source, options=options):
            for piece in column.texts(batch):
                yield piece
                used += len(piece.text)
                if used >= _MOST_MAPPED_BYTES:
                    mapped.madvise(mmap.MADV_DONTNEED)
                    used = 0
            batches += 1
            of.fraction = source.tell() / source.size()
        if expected is None:
            _require_end(source, of.name)
        elif batches != expected:
            raise UserError(f"{of.name} lists {expected} record batches, but has {batches}: write the file again.")
        of.fraction = 1.0


def _require_end(source: Any, name: str) -> None:
    """Refuse a stream without its end mark: pyarrow takes the end of the file for the end of the stream."""
    end = source.tell()
    source.seek(max(0, end - len(_STREAM_END)))
    if source.read(len(_STREAM_END)) != _STREAM_END:
        raise UserError(f"{name} is truncated: the end mark of the Arrow stream is missing. Copy or download it again.")
    if end != source.size():
        raise UserError(f"{name} holds data after the end of its Arrow stream: give each stream as a file of its own.")


def read_parquet(file: BinaryIO, of: SourceFile) -> Iterator[Piece]:
    """The documents of a file that can seek. Each row is one.

    Memory holds a batch of rows, about 1 MiB if texts have similar lengths, and one page of the file. The writer chose
    the size of a page: about 1 MiB, but pyarrow never puts less than 1,024 rows into one. A row group is not held.

    Raises:
        UserError: pyarrow is not installed; the file is damaged; the column is absent, or holds no text.
    """
    parquet = need("pyarrow.parquet", what="Parquet")
    of.fraction = 0.0
    with naming_damage(of.name):
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        column = _column(table.schema_arrow, of)
        read_rows, rows = 0, table.metadata.num_rows
        for group in range(table.num_row_groups):
            size = _rows_in_a_batch(table, group, column)
            names = [".".join(path) for path in column.paths]
            for batch in table.iter_batches(size, row_groups=[group], columns=names, use_threads=False):
                yield from column.texts(batch)
                read_rows += batch.num_rows
                of.fraction = read_rows / rows
        of.fraction = 1.0


def _rows_in_a_batch(table: Any, group: int, column: TextColumn) -> int:
    """So many rows that a batch has about ``_BATCH_BYTES``, as far as the file says how long its texts are."""
    paths = [".".join(path) for path in column.paths]
    names = [table.schema.column(i).path for i in range(len(table.schema))]
    group_data = table.metadata.row_group(group)
    leaves = [i for i, name in enumerate(names) if any(name == path or name.startswith(f"{path}.") for path in paths)]
    size = sum(group_data.column(i).total_uncompressed_size for i in leaves)
    mean = size / max(1, group_data.num_rows)
    return max(1, min(_MOST_ROWS, round(_BATCH_BYTES / max(1.0, mean))))
