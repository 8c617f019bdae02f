"""The quality rules of Gopher (Rae et al. 2021) and C4 (Raffel et al. 2020) for English text, as datatrove implements them.

Here, whitespace separates words. datatrove's default also counts punctuation marks as words. By that default, most technical
documents have more than one word in five without a letter, so that Gopher's rule on letters removes 95 % of such documents
(docs/evidence/clean.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)")


_FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "c4": ("c4_filters", "C4QualityFilter"),
}
QUALITY_RULES = tuple(_FILTERS)


class Quality:
    """A rule that removes documents by a filter of datatrove. The rule "c4" also removes lines of the remaining documents.

    Args:
        name: one of ``QUALITY_RULES``.

    Attributes:
        filter: datatrove's filter object.

    Raises:
        UserError: The package datatrove is not installed.
    """

    def __init__(self, name: str) -> None:
        module, cls = _FILTERS[name]
        filters = need(f"datatrove.pipeline.filters.{module}", what=name)
        self._name, self.filter = name, getattr(filters, cls)(language=word_tokenizer())
        self._document = need("datatrove.data", what=name).Document

    def __call__(self, text: str) -> str | Removed:
        if not text.strip():
            return Removed(f"{self._name}/empty", "")
        document = self._document(text=text, id="")
        verdict = self.filter.filter(document)
        if verdict is True:
            return str(document.text)
        reason = (verdict[1] if isinstance(verdict, tuple) else "removed").removeprefix("gopher_")
        return Removed(f"{self._name}/{reason}", "")


def word_tokenizer(words: Callable[[str], list[str]] = str.split) -> Any:
    """A word tokenizer for datatrove that needs no model. ``words`` cuts a text into words; sentences end at . ! ? and …"""
    tokenizers = need("datatrove.utils.word_tokenizers", what="quality")

    class Words(tokenizers.WordTokenizer):  # type: ignore[name-defined]
        def word_tokenize(self, text: str) -> list[str]:
            return words(text)

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            ends = [match.end() for match in _SENTENCE_END.finditer(text)]
            if not ends or text[ends[-1] :].strip():
                ends.append(len(text))
            return list(zip([0, *ends], ends, strict=False))

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:stop].strip() for start, stop in self.span_tokenize(text)]

    return Words()
