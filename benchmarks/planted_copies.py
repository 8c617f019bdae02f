"""Make the copies of texts with some words replaced that `clean.py` and `decontamination.py` add to a corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence


def edited(text: str, share: float, words: Sequence[str], generator: random.Random) -> str:
    """Return a copy of `text` with the share `share` of its words replaced by random `words`; spaces and line ends stay."""
    parts = text.split(" ")
    places = [i for i, part in enumerate(parts) if part.strip()]
    for i in generator.sample(places, round(share * len(places))):
        parts[i] = generator.choice(words)
    return " ".join(parts)
