"""Read the documents of an input, and decide for each document: it is trained on, held out for validation, or left out.

Three rules choose the text that is held out for validation:

- Of ten or more plain text files on this machine, whole files are held out, chosen by a hash of their names.
- Of fewer plain text files, the end of each file is held out.
- Of all other files, documents are held out by a hash of their text, so that equal documents are in the same split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from lit_llm.ingest.inputs import Input
from lit_llm.ingest.near_duplicates import Checker, HeldOutIndex
from lit_llm.ingest.open_source import open_source
from lit_llm.ingest.progress import Reading, Report
from lit_llm.ingest.readers import DocumentReader

MIN_FILES_TO_HOLD_OUT = 10

_LONGEST_LINE = 2**20  # the most bytes that are searched for a line end


def path_hash(tail: str) -> float:
    """A hash of ``tail`` in [0, 1): the same on every machine and in every process."""
    return text_hash(tail.encode("utf-8", "surrogateescape"))  # the name of a file may not be UTF-8


def text_hash(text: bytes) -> float:
    """A hash of ``text`` in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def hold_out(files: Sequence[Input], fraction: float) -> list[Input]:
    """Split local plain text files into "train" and "val". About ``fraction`` of all bytes are "val".

    With ten files or more, whole files are held out in the order of a hash of their last two path components until the
    fraction is reached. Files that would exceed twice the fraction are skipped. With fewer files, or if no file is held out,
    the end of every file is held out, starting after a line end if there is one.

    Returns:
        Inputs in the order of ``files``. The training part of a file comes before its held-out part.
    """
    target = fraction * sum(file.size for file in files)
    held_out: set[str] = set()
    if len(files) >= MIN_FILES_TO_HOLD_OUT:
        reached = 0
        for file in sorted(files, key=lambda f: (path_hash("/".join(PurePath(f.source.path).parts[-2:])), f.source.path)):
            if reached < target and reached + file.size <= 2 * target:
                held_out.add(file.source.path)
                reached += file.size
    if held_out:
        return [replace(file, split="val" if file.source.path in held_out else "train") for file in files]
    parts = []
    for file in files:
        cut = _tail_cut(file, fraction)
        parts += [replace(file, split="train", stop=cut), replace(file, split="val", start=cut, stop=file.source.size)]
    return [part for part in parts if part.size]


def _tail_cut(file: Input, fraction: float) -> int:
    """The byte at which a file's held-out end starts: after the first line end in the last ``fraction`` of the file or, if no
    line end is near, at the start of a character."""
    size = file.source.size
    wanted = size - round(size * fraction)
    before = max(wanted - 1, 0)  # a line may end exactly there
    with open_source(file.source) as content:
        content.seek(before)
        text = content.read(min(size - before, _LONGEST_LINE))
    line_end = text.find(b"\n") + 1
    if 0 < line_end < size - before:  # cutting after the last line would leave nothing
        return before + line_end
    # Cut after the bytes, at most 3, that continue a UTF-8 character which started earlier.
    return wanted + next((n for n, byte in enumerate(text[wanted - before :][:4]) if byte & 0xC0 != 0x80), 0)


class SelectedPiece(NamedTuple):
    """Record of a document's piece and the document's split. ``first``, ``last``: whether it begins, or ends, the document."""

    text: bytes
    split: str
    first: bool
    last: bool
    repeats_held_out: bool
    """Whether a training document nearly repeats a held-out document. True only in the last piece of the document."""


@dataclass(frozen=True)
class Selection:
    """The rules that decide which documents are held out, and which are left out, independently of the documents' order."""

    hold_out_below: float = 0.0
    """Documents of inputs without a split are held out if `text_hash` of their text is below this number."""
    held_out: HeldOutIndex | None = None
    """The documents that training documents must not repeat. None: training documents are not compared."""

    def identity(self) -> list[str]:
        """Values for a cache key. The values of two selections differ if they can treat a document differently."""
        return [repr(self.hold_out_below), "" if self.held_out is None else self.held_out.identity()]

    def pieces(
        self, part: Input, report: Report = lambda source, text: None, skipped: Callable[[int], None] = lambda documents: None
    ) -> Iterator[SelectedPiece]:
        """Yield the pieces of the documents of an input, each with the split of its document.

        Args:
            report: called now and then with the bytes of the source, and of text, that were read since the last call.
            skipped: called once, at the end, with the number of the input's documents without text.
        """
        compare = self.held_out is not None and part.start == 0 and part.stop is None
        reading = Reading(report, part.start)
        with DocumentReader(part.source, part.settings, start=part.start, stop=part.stop) as reader:
            first, split, checker = True, "", None
            for piece in reader:
                if first:
                    # Only the first piece of a long document is hashed.
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
