"""Normalise the characters and whitespace of text, and repair text that was decoded with the wrong encoding."""

from __future__ import annotations

import re
import unicodedata

from lit_llm.core.errors import need

# C0 and C1 control characters but for tab and newline, the byte order mark, and code points that are no characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_BLANK_LINES = re.compile(r"\n{3,}")
_LINE_ENDS = ("\r\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")  # those of str.splitlines


def normalise(text: str) -> str:
    """The text in Unicode NFC with ``\\n`` as line end. Removed are control characters, space at line ends, blank lines at the
    start and the end of the text, and all but one of several blank lines in a row. Space at the start of a line, tabs and
    compatibility characters (ﬁ, ², no-break space) stay. If the text ends with newlines, one of them stays.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    for line_end in _LINE_ENDS:  # these passes are ten times as fast as one regular expression
        text = text.replace(line_end, "\n")
    text = _CONTROL.sub("", text.replace("\x1f", " "))  # \x1f separates words
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    stripped = text.strip("\n")
    return f"{stripped}\n" if stripped and text.endswith("\n") else stripped


class FixEncoding:
    """A rule that repairs text decoded with the wrong encoding ("cafÃ©" becomes "café") with the package ftfy.

    Raises:
        UserError: The package is not installed.
    """

    def __init__(self) -> None:
        self._fix = need("ftfy", what="fix_encoding").fix_encoding

    def __call__(self, text: str) -> str:
        return text if text.isascii() else self._fix(text)
