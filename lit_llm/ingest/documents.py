"""Text files as documents: hold out files or parts of files for validation, and read documents in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_llm.ingest.readers.text import cut_pieces, read_bytes

MIN_FILES_TO_HOLD_OUT = 10

_LONGEST_LINE = 2**20  # how many bytes to search for a line end


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int

    @classmethod
    def whole(cls, path: Path) -> Document:
        return cls(path, 0, path.stat().st_size)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[bytes]:
        """The text in pieces of about ``PIECE_BYTES``, cut between tokens if possible, else at a line end or a character."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            for piece in cut_pieces(read_bytes(file, self.size, name=str(self.path))):
                yield piece.text


def path_hash(tail: str) -> float:
    """A hash of ``tail`` in [0, 1): the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(tail.encode(), digest_size=8).digest(), "big") / 2**64


def hold_out(files: Sequence[Path], fraction: float) -> tuple[list[Document], list[Document]]:
    """Split ``files`` into training and held-out text, the latter about ``fraction`` of all bytes.

    With ten files or more, whole files are held out in the order of a hash of their last two path components until the
    fraction is reached. Files that would exceed twice the fraction are skipped. With fewer files, or if no file is held out,
    the end of every file is held out, starting after a line end if there is one.

    Returns:
        Training and held-out documents, in the order of ``files``.
    """
    documents = [Document.whole(path) for path in files]
    target = fraction * sum(document.size for document in documents)
    held: set[Path] = set()
    if len(documents) >= MIN_FILES_TO_HOLD_OUT:
        reached = 0
        for document in sorted(documents, key=lambda d: (path_hash("/".join(d.path.parts[-2:])), d.path)):
            if reached < target and reached + document.size <= 2 * target:
                held.add(document.path)
                reached += document.size
    if held:
        return [d for d in documents if d.path not in held], [d for d in documents if d.path in held]
    cuts = [_tail_cut(document, fraction) for document in documents]
    heads = [Document(d.path, d.start, cut) for d, cut in zip(documents, cuts, strict=True)]
    tails = [Document(d.path, cut, d.stop) for d, cut in zip(documents, cuts, strict=True)]
    return [d for d in heads if d.size], [d for d in tails if d.size]


def _tail_cut(document: Document, fraction: float) -> int:
    """Where the last ``fraction`` of a document starts: after the first line end from there, else at a character."""
    wanted = document.stop - round(document.size * fraction)
    before = max(wanted - 1, document.start)  # a line may end exactly there
    with open(document.path, "rb") as file:
        file.seek(before)
        text = file.read(min(document.stop - before, _LONGEST_LINE))
    line_end = text.find(b"\n") + 1
    if 0 < line_end < document.stop - before:  # cutting after the last line would leave nothing
        return before + line_end
    return wanted + _character_start(text[wanted - before :])


def _character_start(text: bytes) -> int:
    """How many leading bytes continue a UTF-8 character that started earlier (at most 3)."""
    return next((n for n in range(min(4, len(text))) if text[n] & 0xC0 != 0x80), 0)
