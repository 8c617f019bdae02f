"""What a rule is: a function of one text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Removed(NamedTuple):
    """Why a document is removed."""

    rule: str
    """A step and a reason: "gopher/too_few_words". The report counts by it."""
    detail: str
    """What was found in this document, for the samples: "31 words"."""
    secret: bool = False
    """Whether the samples must not show the text."""


Rule = Callable[[str], str | Removed]
"""The text, perhaps changed, or why the document is removed. It depends on the text alone, so any worker gives the same."""


class Step(NamedTuple):
    """A rule and the name under which the report counts its time and its changes."""

    name: str
    rule: Rule
