"""Tokenise one job into its part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_llm.ingest.inputs import Input, Job
from lit_llm.ingest.parts import Part, PartCounts, PartWriter, token_type
from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.selection import SelectedPiece, Selection
from lit_llm.tokenizers import Bytes, Tokenizer
from lit_llm.tokenizers.encoder import EncoderChoice, PieceEncoder

_FLUSH_TOKENS = 2**18  # written at a time
_SECONDS_BETWEEN_REPORTS = 0.2

Report = Callable[[int, int], None]
"""Takes the bytes of sources and of text that were read since the last call."""


@dataclass(frozen=True)
class Recipe:
    """What the tokens of a job depend on, besides its inputs."""

    tokenizer: Tokenizer
    encoder: EncoderChoice
    selection: Selection


class JobRunner:
    """Tokenise jobs, one after the other, in one process.

    Args:
        folder: where parts are written.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self._encoder = PieceEncoder(recipe.tokenizer, recipe.encoder)
        bos, eos = recipe.tokenizer.bos_id, recipe.tokenizer.eos_id
        self._bos = np.array([] if bos is None else [bos], dtype=np.int64)
        self._eos = np.array([] if eos is None else [eos], dtype=np.int64)

    def run(self, job: Job, key: str, report: Report) -> Part:
        """Write the part ``key``.

        Raises:
            UserError: A source cannot be read as text.
            OSError: The disk refused.
        """
        part, dtype = Part(), token_type(self.recipe.tokenizer.vocab_size)
        with ExitStack() as stack:
            writers: dict[str, _Documents] = {}
            for one in job.inputs:
                pieces = self._pieces(one, part, report)
                if self.recipe.encoder.join == "document":
                    pieces = _whole_documents(pieces)
                for piece in pieces:
                    if piece.split not in writers:
                        writer = stack.enter_context(PartWriter(self.folder / f"{key}.{piece.split}", dtype))
                        writers[piece.split] = _Documents(writer, self._bos, self._eos)
                    before = self._encoder.unknown_tokens, self._encoder.unknown_bytes
                    (ids,) = self._encoder.encode([piece.text], [not piece.first])
                    after = self._encoder.unknown_tokens, self._encoder.unknown_bytes
                    writers[piece.split].append(piece, ids, (after[0] - before[0], after[1] - before[1]))
            for documents in writers.values():
                documents.flush()
        part.splits = {split: documents.file.counts for split, documents in writers.items()}
        part.near_duplicates += sum(documents.dropped for documents in writers.values())
        part.write(self.folder, key)
        return part

    def _pieces(self, one: Input, part: Part, report: Report) -> Iterator[SelectedPiece]:
        """The pieces of an input, reported and checked."""
        keeps_bytes = isinstance(self.recipe.tokenizer, Bytes)
        position, size, before, skipped = one.start, 0, time.monotonic(), 0

        def seen(reader: DocumentReader) -> None:
            nonlocal position, size, before, skipped
            skipped = reader.skipped
            if time.monotonic() - before >= _SECONDS_BETWEEN_REPORTS:
                report(max(0, reader.position - position), size)
                position, size, before = max(position, reader.position), 0, time.monotonic()

        for piece in self.recipe.selection.pieces(one, seen):
            size += len(piece.text)
            if not keeps_bytes and not _is_utf8(piece.text) and one.source.path not in part.invalid:
                part.invalid.append(one.source.path)
            if piece.first and piece.last and piece.repeats_held_out:
                part.near_duplicates += 1  # not worth encoding; a longer document is written and taken back
                continue
            yield piece
        part.skipped += skipped
        report(max(0, one.start + one.size - position), size)


class _Documents:
    """The documents of one split, appended to a part. They are written many at a time."""

    def __init__(self, file: PartWriter, bos: np.ndarray, eos: np.ndarray) -> None:
        self.file, self.dropped = file, 0
        self._bos, self._eos = bos, eos
        self._run: list[np.ndarray] = []  # not written yet
        self._ends: list[int] = []
        self._tokens = 0  # written or not
        self._start = 0  # where the document that is being written begins
        self._counts = PartCounts()  # of that document

    def append(self, piece: SelectedPiece, ids: np.ndarray, unknown: tuple[int, int]) -> None:
        """Append a piece with its ids, and the number and bytes of its unknown characters."""
        if piece.first:
            self._start, self._counts = self._tokens, PartCounts()
            self._add(self._bos)
        self._add(ids)
        self._counts.add(PartCounts(bytes=len(piece.text), unknown_tokens=unknown[0], unknown_bytes=unknown[1]))
        if piece.last and piece.repeats_held_out:
            self.flush()
            self.file.drop_from(self._start)
            self._tokens = self._start
            self.dropped += 1
        elif piece.last:
            self._add(self._eos)
            self._ends.append(self._tokens)
            self.file.counts.add(self._counts)
        if self._tokens - self.file.counts.tokens >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what has been appended."""
        if self._run:
            self.file.write(np.concatenate(self._run))
        if self._ends:
            self.file.end_documents(np.array(self._ends, dtype=np.int64))
        self._run, self._ends = [], []

    def _add(self, ids: np.ndarray) -> None:
        self._run.append(ids)
        self._tokens += len(ids)


def _whole_documents(pieces: Iterator[SelectedPiece]) -> Iterator[SelectedPiece]:
    """Documents in one piece, for a tokenizer whose ids of a document are not those of its pieces. Memory grows with them."""
    texts: list[bytes] = []
    for piece in pieces:
        texts.append(piece.text)
        if piece.last:
            yield piece._replace(text=b"".join(texts), first=True)
            texts = []


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
