"""Pass 3: write the lines of a part that are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_llm.clean.document_parts import LINES
from lit_llm.ingest.progress import Reading, Report
from lit_llm.ingest.token_parts import part_file

KEPT = ".kept"
"""What follows the key in the name of the written file."""


class KeptLines(NamedTuple):
    """A part, and which of its lines are kept."""

    part: str
    keep: np.ndarray
    """(n,) bool."""
    size: int
    """Bytes of the part's lines."""

    def key(self) -> str:
        """The name of the file: different for other lines."""
        return hashlib.sha256(self.part.encode() + np.packbits(self.keep).tobytes()).hexdigest()[:32]


def write_lines(folder: Path, job: KeptLines, key: str, report: Report) -> str:
    """Write the kept lines into a file, and return its name."""
    reading, position = Reading(report), 0
    with open(folder / f"{job.part}{LINES}", "rb") as lines, part_file(folder / f"{key}{KEPT}") as file:
        for line, keep in zip(lines, job.keep.tolist(), strict=True):
            if keep:
                file.write(line)
            position += len(line)
            reading.add(len(line), position)
    reading.end(position)
    return f"{key}{KEPT}"


def read_written(folder: Path, key: str) -> str | None:
    """The name of the file that an earlier run has written; None if it has not."""
    return f"{key}{KEPT}" if (folder / f"{key}{KEPT}").is_file() else None
