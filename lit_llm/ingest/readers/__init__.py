"""Read documents from files of any format. Most modules of this package read one format."""

from __future__ import annotations

from lit_llm.ingest.readers.document_reader import DocumentReader
from lit_llm.ingest.readers.interface import ReadSettings

__all__ = ["DocumentReader", "ReadSettings"]
