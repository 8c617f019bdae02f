"""Copies of texts with some words changed, which `clean.py` and `decontamination.py` plant."""

from __future__ import annotations

import random
from collections.abc import Sequence


def edited(text: str, share: float, words: Sequence[str], generator: random.Random) -> str:
    """A copy with this share of the words replaced; spaces and line ends stay."""
    parts = text.split(" ")
    places = [i for i, part in enumerate(parts) if part.strip()]
    for i in generator.sample(places, round(share * len(places))):
        parts[i] = generator.choice(words)
    return " ".join(parts)
