"""The text column of a table, of Parquet or Arrow."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers import interface
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.plain_text import cut_pieces, pieces_of
from lit_llm.ingest.readers.text_value import keys_of, missing_key

_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}


class TextColumn:
    """Where the text is in the tables of one file.

    Args:
        schema: the pyarrow schema of the file. A column whose name contains the dots of the key wins.

    Raises:
        UserError: There is no such column, or it holds neither strings nor bytes.
    """

    path: list[str]
    """Name of the column, and of the fields that lead to the text."""

    paths: list[list[str]]
    """Of all that is read: this path, and perhaps others."""

    what = "text"
    """What the column holds."""
    wanted = "the text must be strings"
    """Which types are read, for messages."""

    def __init__(self, schema: Any, of: SourceFile) -> None:
        self._of, self._rows, name, key = of, 0, of.name, of.key
        self._types = need("pyarrow", what="Parquet and Arrow").types
        found = self._find(schema, key)
        if found is None:
            raise missing_key(name, key, keys_of(self._tree(schema), key), kind="column", what=self.what)
        self.path, kind = found
        self.paths = [self.path]
        if not self.is_wanted(kind.value_type if self._types.is_dictionary(kind) else kind):
            raise UserError(
                f"{name} has {kind} in the column {key!r}, but {self.wanted}: name another (--data.{self.what}_key)."
            )

    def texts(self, batch: Any) -> Iterator[Piece]:
        """The documents of a record batch that has the column. Bytes are accepted if they are UTF-8.

        Raises:
            UserError: A text is not UTF-8.
        """
        batch.validate()  # of offsets and sizes, which a damaged file may have wrong
        for text in self._cells(self.values(batch)):
            self._rows += 1
            if not text:
                self._of.skipped += 1
                continue
            try:
                yield from _pieces(text)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self._of.name} row {self._rows} holds no UTF-8 in the column {'.'.join(self.path)!r}: "
                    "name another (--data.text_key), or remove the row."
                ) from error

    def values(self, batch: Any, path: list[str] | None = None) -> Any:
        """The column of a record batch, or the field of a struct in it."""
        first, *fields = path or self.path
        column = batch.column(batch.schema.names.index(first))
        for field in fields:
            column = column.flatten()[column.type.get_field_index(field)]  # unlike field(), null where the struct is null
        return column

    def _cells(self, column: Any) -> Iterator[memoryview | None]:
        """The bytes of each text, not copied; None for null. pyarrow's own values are copies."""
        types = self._types
        if types.is_dictionary(column.type) or types.is_string_view(column.type) or types.is_binary_view(column.type):
            column.validate(full=True)  # pyarrow reads where an index or a view points, even outside the data
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        column = column.cast("large_binary")  # copies strings only if they are views
        _, offsets, data_buffer = column.buffers()
        ends = memoryview(offsets).cast("B").cast("q")[column.offset :]
        data = memoryview(data_buffer or b"").cast("B")
        for row, is_valid in enumerate(column.is_valid().to_pylist()):
            yield data[ends[row] : ends[row + 1]] if is_valid else None

    def _find(self, fields: Any, key: str) -> tuple[list[str], Any] | None:
        """The way to ``key`` among the fields of a schema or a struct, and the type there."""
        types = {field.name: field.type for field in fields}
        first, dot, rest = key.partition(".")
        if key in types:
            return [key], types[key]
        if not dot or first not in types or not self._types.is_struct(types[first]):
            return None
        below = self._find(types[first], rest)
        return below and ([first, *below[0]], below[1])

    def is_wanted(self, kind: Any) -> bool:
        """Whether values of this type are read."""
        return str(kind) in _TEXT_TYPES

    def _tree(self, fields: Any) -> dict[str, Any]:
        return {field.name: self._tree(field.type) if self._types.is_struct(field.type) else None for field in fields}


def _pieces(text: memoryview) -> Iterable[Piece]:
    """The pieces of a document. Raises UnicodeDecodeError if it is not UTF-8."""
    if len(text) > interface.PIECE_BYTES:
        return cut_pieces(_parts(text))
    copy = bytes(text)
    copy.decode()
    return pieces_of(copy)


def _parts(text: memoryview) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), interface.PIECE_BYTES):
        part = bytes(text[start : start + interface.PIECE_BYTES])
        decoder.decode(part, final=start + len(part) == len(text))
        yield part
