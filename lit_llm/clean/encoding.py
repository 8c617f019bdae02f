"""Text that was decoded with the wrong encoding: "cafÃ©" becomes "café"."""

from __future__ import annotations

from lit_llm.ingest.optional_package import need


class FixEncoding:
    """Repair text with the package ftfy, where its result is surely better.

    Raises:
        UserError: The package is not installed.
    """

    def __init__(self) -> None:
        self._fix = need("ftfy", extra="clean", what="fix_encoding").fix_encoding

    def __call__(self, text: str) -> str:
        return text if text.isascii() else self._fix(text)
