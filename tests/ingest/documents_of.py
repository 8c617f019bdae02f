"""Read a file with `DocumentReader` and join the pieces of each document."""

from __future__ import annotations

from pathlib import Path

from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.source import Source


def documents_of(path: Path, **settings: str) -> list[bytes]:
    """The documents of a file. No document may lack its last piece."""
    documents, parts = [], []
    with DocumentReader(Source.local(path), ReadSettings(**settings)) as reader:
        for piece in reader:
            parts.append(piece.text)
            if piece.last:
                documents.append(b"".join(parts))
                parts = []
    assert not parts
    return documents
