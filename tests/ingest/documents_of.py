"""What `DocumentReader` makes of a file: documents, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_llm.errors import UserError
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


def refusal(path: Path, **settings: str) -> str:
    """The sentence with which a file is refused. It names the file."""
    with pytest.raises(UserError) as caught:
        documents_of(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def write(folder: Path, content: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path
