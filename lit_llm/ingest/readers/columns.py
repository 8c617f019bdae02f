"""The text column of a Parquet or Arrow table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.plain_text import pieces_of
from lit_llm.ingest.readers.text_value import is_utf8, keys_of, missing_key

_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}


class TextColumn:
    """Reads the documents in the text column of one Parquet or Arrow file.

    Args:
        schema: the pyarrow schema of the file. For the key "a.b", a column named "a.b" takes precedence over a field b of a.
        of: the file, with the key of the column.

    Raises:
        UserError: There is no such column, or the column has neither strings nor bytes.
    """

    path: list[str]
    """The name of the column and, if it is a struct, the names of the nested fields down to the text."""

    paths: list[list[str]]
    """The paths of all columns to read: ``path``, and for conversations perhaps the columns beside the messages."""

    what = "text"
    """The content of the column, "text" or "messages", for error messages."""
    wanted = "the text must be strings"
    """A clause about the types that the column may have, for error messages."""

    def __init__(self, schema: Any, of: SourceFile) -> None:
        self._of, self._rows, name, key = of, 0, of.name, of.key
        self._types = need("pyarrow", what="Parquet and Arrow").types
        column = self._find(schema, key)
        if column is None:
            raise missing_key(name, key, keys_of(self._tree(schema), key), kind="column", what=self.what)
        self.path, kind = column
        self.paths = [self.path]
        if not self.is_wanted(kind.value_type if self._types.is_dictionary(kind) else kind):
            raise UserError(
                f"{name} has {kind} in the column {key!r}, but {self.wanted}: name another (--data.{self.what}_key)."
            )

    def texts(self, batch: Any) -> Iterator[Piece]:
        """Yield the documents of a pyarrow record batch with the column, in pieces. Binary values must be UTF-8.

        Raises:
            UserError: A text is not UTF-8.
        """
        batch.validate(full=True)  # checks offsets, indices and views, which a damaged file may have wrong
        column = self.values(batch)
        if self._types.is_dictionary(column.type):
            column = column.dictionary_decode()
        for cell in column.cast("large_binary"):
            self._rows += 1
            if not (text := cell.as_py()):
                self._of.skipped += 1
                continue
            if not is_utf8(text):
                raise UserError(
                    f"{self._of.name} row {self._rows} holds no UTF-8 in the column {'.'.join(self.path)!r}: "
                    "name another (--data.text_key), or remove the row."
                )
            yield from pieces_of(text)

    def values(self, batch: Any, path: list[str] | None = None) -> Any:
        """The pyarrow array of the column or nested field of a record batch that ``path`` names. None: `self.path`."""
        first, *fields = path or self.path
        column = batch.column(batch.schema.names.index(first))
        for field in fields:
            column = column.flatten()[column.type.get_field_index(field)]  # unlike field(), null where the struct is null
        return column

    def _find(self, fields: Any, key: str) -> tuple[list[str], Any] | None:
        """(path of the field that ``key`` names in a schema or struct, ``fields``; its type). None: no such field."""
        types = {field.name: field.type for field in fields}
        first, dot, rest = key.partition(".")
        if key in types:
            return [key], types[key]
        if not dot or first not in types or not self._types.is_struct(types[first]):
            return None
        below = self._find(types[first], rest)
        return below and ([first, *below[0]], below[1])

    def is_wanted(self, kind: Any) -> bool:
        """Whether a column of the pyarrow type ``kind`` can be read."""
        return str(kind) in _TEXT_TYPES

    def _tree(self, fields: Any) -> dict[str, Any]:
        return {field.name: self._tree(field.type) if self._types.is_struct(field.type) else None for field in fields}
