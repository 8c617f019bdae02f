"""Keep documents of chosen languages, which the package py3langid identifies with a model that the package includes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need, refuse

_PARTS, _PART = 4, 1000  # four parts of 1,000 characters decide the language of a long document


@dataclass
class Language:
    """A rule that keeps documents in any of ``languages``.

    Args:
        languages: ISO 639 codes, such as "en".
        confidence: the smallest probability of the identified language with which a document is kept, between 0 and 1.

    Raises:
        UserError: The package py3langid is not installed, or does not know some languages: one sentence for each language.
    """

    languages: Sequence[str]
    confidence: float

    def __post_init__(self) -> None:
        refuse(_unknown(self.languages))
        self._identifier = identifier()

    def __call__(self, text: str) -> str | Removed:
        language, confidence = self._identifier.classify(_sample(text))
        if language in self.languages and confidence >= self.confidence:
            return text
        name = language if language not in self.languages else "uncertain"
        return Removed(f"languages/{name}", f"{language} with probability {confidence:.2f}")


def _unknown(given: Iterable[str]) -> Iterator[str]:
    """Yield a sentence about each language code that py3langid does not know, with the most similar known codes."""
    known = sorted(identifier().labels)
    for language in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(language.lower().replace("_", "-").partition("-")[0], known) or ["en"]
        yield f"Language {language!r} is not known: give an ISO 639 code, such as {' or '.join(near)} (--languages)."


@functools.cache
def identifier() -> Any:
    """py3langid's model, set to give probabilities instead of scores. The model takes 80 MB and is loaded once in a process.

    Raises:
        UserError: The package is not installed.
    """
    langid = need("py3langid.langid", what="languages")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _sample(text: str) -> str:
    """A short ``text`` itself; of a long text, four parts of 1,000 characters from start to end, so identification is fast."""
    if len(text) <= _PARTS * _PART:
        return text
    last = len(text) - _PART
    starts = [last * i // (_PARTS - 1) for i in range(_PARTS)]
    return "\n".join(text[start : start + _PART] for start in starts)
