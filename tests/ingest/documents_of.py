"""What `DocumentReader` makes of a file: documents, or a refusal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers import DocumentReader, ReadSettings, document_reader
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


def forward_only(monkeypatch: pytest.MonkeyPatch, content: bytes) -> Source:
    """A file of a plain web server."""
    monkeypatch.setattr(document_reader, "open_source", lambda source: _ForwardOnlyFile(content))
    return Source("http://host/file", len(content), "")


class _ForwardOnlyFile(io.RawIOBase):
    """It cannot seek, and returns less than it is asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self.content.read(min(size, 1000) if size >= 0 else 1000)

    def tell(self) -> int:
        return self.content.tell()
