"""What a reader reports beside the documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    skipped: int = 0
    """Documents without text: null or empty."""
    fraction: float | None = None
    """How much of the file is read, where the position in the file does not tell."""
