"""How text travels from a reader to a tokenizer: in pieces, so that memory is bounded whatever the length of a document."""

from __future__ import annotations

from typing import NamedTuple

PIECE_BYTES = 2**18
"""About how many bytes a piece has. Pieces are cut where no tokenizer joins text, if there is such a place."""


class Piece(NamedTuple):
    """A part of a document, or all of it. The pieces of a document follow each other."""

    text: bytes
    """UTF-8. A plain text file may hold other bytes, which are passed on as they are."""
    last: bool
    """Whether the document ends with this piece."""
