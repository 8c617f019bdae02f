"""Tokenise one job into its part."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lit_llm.ingest.chat import ChatEncoder, ChatTemplate
from lit_llm.ingest.inputs import Input, Job
from lit_llm.ingest.progress import Report
from lit_llm.ingest.selection import SelectedPiece, Selection
from lit_llm.ingest.token_parts import Part, PartCounts, PartWriter, token_type
from lit_llm.tokenizers import Bytes, Tokenizer
from lit_llm.tokenizers.encoder import EncoderChoice, PieceEncoder

_FLUSH_TOKENS = 2**18  # written at a time


@dataclass(frozen=True)
class Recipe:
    """What the tokens of a job depend on, besides its inputs."""

    tokenizer: Tokenizer
    encoder: EncoderChoice | ChatTemplate
    """How texts are encoded; of a template, documents are conversations."""
    selection: Selection

    @property
    def masked(self) -> bool:
        """Whether only some tokens are targets."""
        return isinstance(self.encoder, ChatTemplate)

    @property
    def document_ids(self) -> tuple[int | None, int | None]:
        """The ids before and after every document. A template writes its own."""
        return (None, None) if self.masked else (self.tokenizer.bos_id, self.tokenizer.eos_id)


class JobRunner:
    """Tokenise jobs, one after the other, in one process.

    Args:
        folder: where parts are written.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        bos, eos = recipe.document_ids
        self._bos = np.array([] if bos is None else [bos], dtype=np.int64)
        self._eos = np.array([] if eos is None else [eos], dtype=np.int64)

    @functools.cached_property
    def _encoder(self) -> _Encoder:  # when the first job runs, in the process of the worker
        tokenizer, encoder = self.recipe.tokenizer, self.recipe.encoder
        if isinstance(encoder, ChatTemplate):
            return _Conversations(ChatEncoder(tokenizer, encoder))
        return _Texts(PieceEncoder(tokenizer, encoder))

    def run(self, job: Job, key: str, report: Report) -> Part:
        """Write the part ``key``.

        Raises:
            UserError: A source cannot be read as text.
            OSError: The disk refused.
        """
        masked = self.recipe.masked
        part, dtype = Part(masked=masked), token_type(self.recipe.tokenizer.vocab_size)
        with ExitStack() as stack:
            writers: dict[str, _Documents] = {}
            for one in job.inputs:
                pieces = self._pieces(one, part, report)
                if isinstance(self.recipe.encoder, EncoderChoice) and self.recipe.encoder.join == "document":
                    pieces = _whole_documents(pieces)
                documents = 0
                for piece in pieces:
                    documents += piece.first
                    if piece.split not in writers:
                        path = self.folder / f"{key}.{piece.split}"
                        writer = stack.enter_context(PartWriter(path, dtype, masked=masked))
                        writers[piece.split] = _Documents(writer, self._bos, self._eos)
                    where = f"conversation {documents} of {one.source.name}"
                    writers[piece.split].append(piece, self._encoder.encode(piece, where))
            for of_split in writers.values():
                of_split.flush()
        part.splits = {split: of_split.file.counts for split, of_split in writers.items()}
        part.near_duplicates += sum(of_split.dropped for of_split in writers.values())
        part.write(self.folder, key)
        return part

    def _pieces(self, one: Input, part: Part, report: Report) -> Iterator[SelectedPiece]:
        """The pieces of an input, reported and checked."""
        keeps_bytes = isinstance(self.recipe.tokenizer, Bytes)
        skipped: list[int] = []
        for piece in self.recipe.selection.pieces(one, report, skipped.append):
            if not keeps_bytes and not _is_utf8(piece.text) and one.source.path not in part.invalid:
                part.invalid.append(one.source.path)
            if piece.first and piece.last and piece.repeats_held_out:
                part.near_duplicates += 1  # not worth encoding; a longer document is written and taken back
                continue
            yield piece
        part.skipped += sum(skipped)


class _Encoded(NamedTuple):
    """A piece as it is written."""

    ids: np.ndarray
    """(n,)."""
    counts: PartCounts
    """Of its text."""
    mask: np.ndarray | None = None
    """(n,) uint8."""


class _Encoder(Protocol):
    def encode(self, piece: SelectedPiece, where: str) -> _Encoded:
        """The ids of a piece of the document at ``where``."""


class _Texts:
    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    def encode(self, piece: SelectedPiece, where: str) -> _Encoded:
        before = self._encoder.unknown_tokens, self._encoder.token_bytes
        (ids,) = self._encoder.encode([piece.text], [not piece.first])
        counts = PartCounts(
            bytes=len(piece.text),
            unknown_tokens=self._encoder.unknown_tokens - before[0],
            token_bytes=self._encoder.token_bytes - before[1],
        )
        return _Encoded(ids, counts)


class _Conversations:
    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def encode(self, piece: SelectedPiece, where: str) -> _Encoded:
        encoded = self._encoder.encode(piece.text, where=where)
        return _Encoded(encoded.ids, PartCounts(bytes=encoded.bytes, token_bytes=encoded.bytes), encoded.mask)


class _Documents:
    """The documents of one split, appended to a part. They are written many at a time."""

    def __init__(self, file: PartWriter, bos: np.ndarray, eos: np.ndarray) -> None:
        self.file, self.dropped = file, 0
        self._bos, self._eos = bos, eos
        self._run: list[np.ndarray] = []  # not written yet
        self._masks: list[np.ndarray] = []  # of these ids, if there are masks
        self._ends: list[int] = []
        self._tokens = 0  # written or not
        self._start = 0  # where the document that is being written begins
        self._counts = PartCounts()  # of that document

    def append(self, piece: SelectedPiece, encoded: _Encoded) -> None:
        """Append a piece with its ids."""
        if piece.first:
            self._start, self._counts = self._tokens, PartCounts()
            self._add(self._bos)
        self._add(encoded.ids)
        if encoded.mask is not None:
            self._masks.append(encoded.mask)
        self._counts.add(encoded.counts)
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
            self.file.write(np.concatenate(self._run), np.concatenate(self._masks) if self._masks else None)
        if self._ends:
            self.file.end_documents(np.array(self._ends, dtype=np.int64))
        self._run, self._masks, self._ends = [], [], []

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
