"""Text from elsewhere where its control characters would do something: in a terminal, in a comment. No torch."""

from __future__ import annotations

import re
import sys
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed
_LINE_END = re.compile(r"[\n\u2028\u2029]")


def for_output(text: str, file: TextIO | None = None) -> str:
    """The text as it is; for a terminal, with each control character shown as its escape (`\\x1b`) and not sent.

    Args:
        file: None: standard output.
    """
    return _shown(_CONTROL, text) if (file or sys.stdout).isatty() else text


def comment(text: str) -> str:
    """One line of YAML that is a comment, whatever names the text contains."""
    return f"# {_shown(_LINE_END, _shown(_CONTROL, text))}\n"


def _shown(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
