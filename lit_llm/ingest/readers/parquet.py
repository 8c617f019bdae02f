"""Parquet: the text column, row group by row group, in small batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from lit_llm.core.errors import need
from lit_llm.ingest.readers.arrow import naming_damage
from lit_llm.ingest.readers.columns import TextColumn
from lit_llm.ingest.readers.interface import Counts, Piece

_BUFFER_BYTES = 2**20  # of the file, read at a time
_BATCH_BYTES = 2**20  # of text, on average
_MOST_ROWS = 1000  # in a batch: texts that are stored once may be large


def read_parquet(
    file: BinaryIO, key: str, counts: Counts, *, name: str, column_type: type[TextColumn] = TextColumn
) -> Iterator[Piece]:
    """The documents of a file that can seek. Each row is one.

    Memory holds a batch of rows, about 1 MiB if texts have similar lengths, and one page of the file. The writer chose
    the size of a page: about 1 MiB, but pyarrow never puts less than 1,024 rows into one. A row group is not held.

    Args:
        key: the column of the text, with dots into structs.
        name: the file's name, for messages.
        column_type: what the column holds, and how it is read.

    Raises:
        UserError: pyarrow is not installed; the file is damaged; the column is absent, or holds no text.
    """
    parquet = need("pyarrow.parquet", extra="data", what="Parquet")
    counts.fraction = 0.0
    with naming_damage(name):
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        column = column_type(table.schema_arrow, key, counts, name=name)
        read_rows, rows = 0, table.metadata.num_rows
        for group in range(table.num_row_groups):
            size = _rows_in_a_batch(table, group, column)
            names = [".".join(path) for path in column.paths]
            for batch in table.iter_batches(size, row_groups=[group], columns=names, use_threads=False):
                yield from column.texts(batch)
                read_rows += batch.num_rows
                counts.fraction = read_rows / rows
        counts.fraction = 1.0


def _rows_in_a_batch(table: Any, group: int, column: TextColumn) -> int:
    """So many rows that a batch has about ``_BATCH_BYTES``, as far as the file says how long its texts are."""
    paths = [".".join(path) for path in column.paths]
    names = [table.schema.column(i).path for i in range(len(table.schema))]
    group_data = table.metadata.row_group(group)
    leaves = [i for i, name in enumerate(names) if any(name == path or name.startswith(f"{path}.") for path in paths)]
    size = sum(group_data.column(i).total_uncompressed_size for i in leaves)
    mean = size / max(1, group_data.num_rows)
    return max(1, min(_MOST_ROWS, round(_BATCH_BYTES / max(1.0, mean))))
