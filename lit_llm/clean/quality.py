"""The quality rules of Gopher (Rae et al. 2021) and C4 (Raffel et al. 2020) for English text, as datatrove implements them.

Words are what whitespace separates. datatrove's own default counts punctuation marks as words. Then one word in five has no
letter in most technical documents, and Gopher's rule on letters removes 95 % of them (docs/evidence/clean.md).
"""

from __future__ import annotations

import re
from typing import Any

from lit_llm.clean.quality_details import c4_detail, gopher_quality_detail, gopher_repetition_detail
from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)")


_FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter", gopher_quality_detail),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter", gopher_repetition_detail),
    "c4": ("c4_filters", "C4QualityFilter", c4_detail),
}
QUALITY_RULES = tuple(_FILTERS)


class Quality:
    """A rule of datatrove: it removes a document, and C4's also removes lines.

    Args:
        name: of ``QUALITY_RULES``.

    Raises:
        UserError: The package datatrove is not installed.
    """

    def __init__(self, name: str) -> None:
        module, cls, self._detail = _FILTERS[name]
        filters = need(f"datatrove.pipeline.filters.{module}", extra="clean", what=name)
        self._name, self._filter = name, getattr(filters, cls)(language=_words())
        self._document = need("datatrove.data", extra="clean", what=name).Document

    def __reduce__(self) -> tuple[type[Quality], tuple[str]]:
        return Quality, (self._name,)  # datatrove's objects need not be sent to a worker

    def __call__(self, text: str) -> str | Removed:
        if not text.strip():
            return Removed(f"{self._name}/empty", "no text")
        document = self._document(text=text, id="")
        verdict = self._filter.filter(document)
        if verdict is True:
            return str(document.text)
        reason = (verdict[1] if isinstance(verdict, tuple) else "removed").removeprefix("gopher_")
        return Removed(f"{self._name}/{reason}", self._detail(self._filter, reason, text))


def _words() -> Any:
    """How datatrove cuts text into words and sentences. Its other ways need models, or packages of 100 MB."""
    tokenizers = need("datatrove.utils.word_tokenizers", extra="clean", what="quality")

    class Words(tokenizers.WordTokenizer):  # type: ignore[name-defined]
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            ends = [match.end() for match in _SENTENCE_END.finditer(text)]
            if not ends or text[ends[-1] :].strip():
                ends.append(len(text))
            return list(zip([0, *ends], ends, strict=False))

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:stop].strip() for start, stop in self.span_tokenize(text)]

    return Words()
