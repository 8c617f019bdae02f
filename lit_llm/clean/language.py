"""Keep documents of some languages, as py3langid identifies them. It ships its model, so nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need

_PARTS, _PART = 4, 1000  # of a long document, four parts of 1,000 characters are read


@dataclass
class Language:
    """A rule that keeps documents of ``languages``.

    Args:
        languages: ISO 639 codes, such as "en".
        confidence: the smallest probability of the language, between 0 and 1.

    Raises:
        UserError: The package py3langid is not installed.
    """

    languages: Sequence[str]
    confidence: float

    def __post_init__(self) -> None:
        self._identifier = identifier()

    def __call__(self, text: str) -> str | Removed:
        language, confidence = self._identifier.classify(_sample(text))
        if language in self.languages and confidence >= self.confidence:
            return text
        name = language if language not in self.languages else "uncertain"
        return Removed(f"languages/{name}", f"{language} with probability {confidence:.2f}")


def known_languages() -> list[str]:
    """The codes that py3langid knows, sorted.

    Raises:
        UserError: The package is not installed.
    """
    return sorted(identifier().labels)


@functools.cache
def identifier() -> Any:
    """py3langid's model, with probabilities instead of scores. It takes 80 MB, once a process.

    Raises:
        UserError: The package is not installed.
    """
    langid = need("py3langid.langid", extra="clean", what="languages")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _sample(text: str) -> str:
    """``text``, or of a long one its start, its end and two parts between, so that the time does not grow with it."""
    if len(text) <= _PARTS * _PART:
        return text
    last = len(text) - _PART
    starts = [last * i // (_PARTS - 1) for i in range(_PARTS)]
    return "\n".join(text[start : start + _PART] for start in starts)
