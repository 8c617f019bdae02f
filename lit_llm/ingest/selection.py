"""Read the documents of an input, and decide where each goes: training, held out, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lit_llm.ingest.inputs import Input
from lit_llm.ingest.near_duplicates import Checker, HeldOutIndex
from lit_llm.ingest.progress import Reading, Report
from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.split import text_hash


class SelectedPiece(NamedTuple):
    """A piece of a document, and where the document goes."""

    text: bytes
    split: str
    first: bool
    last: bool
    repeats_held_out: bool
    """Known with the last piece: the training document nearly repeats a held-out one."""


@dataclass(frozen=True)
class Selection:
    """The rules: the same in every process and for every order of the documents."""

    hold_out_below: float = 0.0
    """Documents of inputs without a split are held out if the hash of their text is smaller."""
    held_out: HeldOutIndex | None = None
    """What training documents must not repeat. None: they are not compared."""

    def identity(self) -> list[str]:
        """Differs if a document can go somewhere else."""
        return [repr(self.hold_out_below), "" if self.held_out is None else self.held_out.identity()]

    def pieces(
        self, part: Input, report: Report = lambda source, text: None, skipped: Callable[[int], None] = lambda documents: None
    ) -> Iterator[SelectedPiece]:
        """The pieces of an input.

        Args:
            report: of the bytes that are read.
            skipped: called at the end with the number of documents without text.
        """
        compare = self.held_out is not None and part.start == 0 and part.stop is None
        reading = Reading(report, part.start)
        with DocumentReader(part.source, part.settings, start=part.start, stop=part.stop) as reader:
            first, split, checker = True, "", None
            for piece in reader:
                if first:
                    # Of a long document, only the first piece is hashed.
                    split = part.split or ("val" if text_hash(piece.text) < self.hold_out_below else "train")
                    checker = Checker(self.held_out) if compare and split == "train" and self.held_out else None
                if checker is not None:
                    checker.add(piece.text)
                repeats = piece.last and checker is not None and checker.duplicate
                yield SelectedPiece(piece.text, split, first, piece.last, repeats)
                first = piece.last
                reading.add(len(piece.text), reader.position)
            skipped(reader.skipped)
        reading.end(part.start + part.size)
