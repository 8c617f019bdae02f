"""Which scripts have no spaces between words: there, every character is a word.

Elsewhere a word is a run of letters and digits, in lower case. For near-duplicates an underscore is a letter too, and a mark
that combines ends a word. For contamination such a mark is a letter, an underscore ends a word, and text is in the form NFKC.
"""

from __future__ import annotations

# Thai, Lao, Tibetan; Myanmar; Khmer; kana and Bopomofo, and their extensions; Han in all planes.
UNSPACED = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip
"""First and last code point of each block."""

_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)
WORD_PATTERN = f"[{_CLASS}]|[^\\W{_CLASS}]+"
"""A word of a text in lower case, for near-duplicates."""
