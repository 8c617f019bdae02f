"""The text column of a table, of Parquet or Arrow."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from lit_llm.errors import UserError
from lit_llm.ingest import pieces
from lit_llm.ingest.optional_package import need
from lit_llm.ingest.pieces import Piece
from lit_llm.ingest.readers.counts import Counts
from lit_llm.ingest.readers.text import cut_pieces
from lit_llm.ingest.readers.text_value import keys_of, missing_key


class TextColumn:
    """Where the text is in the tables of one file.

    Args:
        schema: the pyarrow schema of the file.
        key: name of a column; with dots, of a field of a struct. A column whose name contains the dots wins.
        name: the file's name, for messages.

    Raises:
        UserError: There is no such column, or it holds neither strings nor bytes.
    """

    path: list[str]
    """Name of the column, and of the fields that lead to the text."""

    def __init__(self, schema: Any, key: str, counts: Counts, *, name: str) -> None:
        self._counts, self._name, self._rows = counts, name, 0
        self._types = need("pyarrow", extra="data", what="Parquet and Arrow").types
        found = self._find(schema, key)
        if found is None:
            raise missing_key(name, key, keys_of(self._tree(schema), key), kind="column")
        self.path, kind = found
        self._is_dictionary = self._types.is_dictionary(kind)
        if not self._is_text(kind.value_type if self._is_dictionary else kind):
            raise UserError(
                f"{name} has {kind} in the column {key!r}, but the text must be strings: name another (--data.text_key)."
            )

    def texts(self, batch: Any) -> Iterator[Piece]:
        """The documents of a record batch that has the column. Bytes are accepted if they are UTF-8.

        Raises:
            UserError: A text is not UTF-8.
        """
        column = batch.column(batch.schema.names.index(self.path[0]))
        for field in self.path[1:]:
            column = column.flatten()[column.type.get_field_index(field)]  # unlike field(), null where the struct is null
        if self._is_dictionary:
            column = column.dictionary_decode()
        for scalar in column:
            self._rows += 1
            if not scalar.is_valid or not (text := memoryview(scalar.as_buffer())):
                self._counts.skipped += 1
                continue
            try:
                yield from cut_pieces(_checked(text))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self._name} row {self._rows} holds no UTF-8 in the column {'.'.join(self.path)!r}: "
                    "name another (--data.text_key), or remove the row."
                ) from error

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

    def _is_text(self, kind: Any) -> bool:
        types = self._types
        strings = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
        return strings or binary or types.is_null(kind)

    def _tree(self, fields: Any) -> dict[str, Any]:
        return {field.name: self._tree(field.type) if self._types.is_struct(field.type) else None for field in fields}


def _checked(text: memoryview) -> Iterator[bytes]:
    """``text`` in parts. Raises UnicodeDecodeError if it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), pieces.PIECE_BYTES):
        part = bytes(text[start : start + pieces.PIECE_BYTES])
        decoder.decode(part, final=start + len(part) == len(text))
        yield part
