"""Tokenise one job, and write the tokens into the files of its part."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_llm.ingest.chat import ChatEncoder, ChatTemplate
from lit_llm.ingest.inputs import Input, Job
from lit_llm.ingest.progress import Report
from lit_llm.ingest.readers.text_value import is_utf8
from lit_llm.ingest.selection import SelectedPiece, Selection
from lit_llm.ingest.token_parts import Part, PartCounts, PartWriter, token_type
from lit_llm.tokenizers import Bytes, Tokenizer
from lit_llm.tokenizers.encoder import EncoderChoice, PieceEncoder


@dataclass
class JobRunner:
    """Tokenises jobs, one after the other, in one process."""

    tokenizer: Tokenizer
    encoder: EncoderChoice | ChatTemplate
    """The way in which texts are encoded. With a ``ChatTemplate``, documents are conversations."""
    selection: Selection
    folder: Path
    """The folder into which parts are written."""

    @property
    def masked(self) -> bool:
        """Whether masks are written: for conversations, in which only the assistant's tokens are targets."""
        return isinstance(self.encoder, ChatTemplate)

    @property
    def document_ids(self) -> tuple[int | None, int | None]:
        """The BOS and the EOS id around every document; None: no id. A chat template writes such ids itself: both are None."""
        return (None, None) if self.masked else (self.tokenizer.bos_id, self.tokenizer.eos_id)

    @functools.cached_property
    def _encoder(self) -> ChatEncoder | PieceEncoder:  # when the first job runs, in the process of the worker
        if isinstance(self.encoder, ChatTemplate):
            return ChatEncoder(self.tokenizer, self.encoder)
        return PieceEncoder(self.tokenizer, self.encoder)

    def run(self, job: Job, key: str, report: Report) -> Part:
        """Tokenise a job. Write its part to files named after ``key``, and return the counts of the part.

        Raises:
            UserError: A source cannot be read as text.
            OSError: The disk is full, or refuses otherwise.
        """
        part, dtype = Part(masked=self.masked), token_type(self.tokenizer.vocab_size)
        with ExitStack() as stack:
            writers: dict[str, PartWriter] = {}
            for one in job.inputs:
                pieces = self._pieces(one, part, report)
                if isinstance(self.encoder, EncoderChoice) and self.encoder.join == "document":
                    pieces = _whole_documents(pieces)
                documents = 0
                for piece in pieces:
                    documents += piece.first
                    if piece.split not in writers:
                        path = self.folder / f"{key}.{piece.split}"
                        writers[piece.split] = PartWriter(path, stack, dtype, self.document_ids, masked=self.masked)
                    where = f"conversation {documents} of {one.source.name}"
                    encoded = self._encode(piece, where)
                    part.pairs += len(encoded) - 1
                    for each in encoded:
                        writers[piece.split].append(piece, *each)
            for writer in writers.values():
                writer.flush()
        part.splits = {split: writer.counts for split, writer in writers.items()}
        part.near_duplicates += sum(writer.dropped for writer in writers.values())
        part.write(self.folder, key)
        return part

    def _encode(self, piece: SelectedPiece, where: str) -> list[tuple[np.ndarray, np.ndarray | None, PartCounts]]:
        """Encode a piece of a document: [(ids (n,), their mask (n,) uint8 or None, counts)].

        For a preference pair, the list has two entries: the document with the chosen answer, then with the rejected answer.
        ``where``: the name of the document in errors.
        """
        encoder = self._encoder
        if isinstance(encoder, ChatEncoder):
            chats = encoder.encode(piece.text, where=where)
            return [(chat.ids, chat.mask, PartCounts(bytes=chat.bytes, token_bytes=chat.bytes)) for chat in chats]
        before = encoder.unknown_tokens, encoder.token_bytes
        ids = encoder.encode(piece.text, continues=not piece.first)
        unknown, known = encoder.unknown_tokens - before[0], encoder.token_bytes - before[1]
        return [(ids, None, PartCounts(bytes=len(piece.text), unknown_tokens=unknown, token_bytes=known))]

    def _pieces(self, one: Input, part: Part, report: Report) -> Iterator[SelectedPiece]:
        """Yield the pieces of an input that are to be encoded. Documents without text, and near-duplicates of one piece, are
        left out, and counted in ``part``. A source with bytes that are not UTF-8 is added to ``part.invalid``."""
        keeps_bytes = isinstance(self.tokenizer, Bytes)
        skipped: list[int] = []
        for piece in self.selection.pieces(one, report, skipped.append):
            if not keeps_bytes and not is_utf8(piece.text) and one.source.path not in part.invalid:
                part.invalid.append(one.source.path)
            if piece.first and piece.last and piece.repeats_held_out:
                part.near_duplicates += 1  # a longer document is encoded before its last piece is known, and then removed
                continue
            yield piece
        part.skipped += sum(skipped)


def _whole_documents(pieces: Iterator[SelectedPiece]) -> Iterator[SelectedPiece]:
    """Yield each document as one piece, for tokenizers that encode a whole document differently from its pieces."""
    texts: list[bytes] = []
    for piece in pieces:
        texts.append(piece.text)
        if piece.last:
            yield piece._replace(text=b"".join(texts), first=True)
            texts = []
