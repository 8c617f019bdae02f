"""Make the rules that the settings switch on, in the order in which a document passes through the rules."""

from __future__ import annotations

from lit_llm.clean.clean_settings import SHORTEST, CleanSettings
from lit_llm.clean.contamination import Contamination, ReferenceIndex, References
from lit_llm.clean.duplicates import finders_of
from lit_llm.clean.language import Language
from lit_llm.clean.normalise import FixEncoding, normalise
from lit_llm.clean.personal_data import ACTIONS, Emails, Secrets
from lit_llm.clean.quality import QUALITY_RULES, Quality
from lit_llm.clean.rules import Rule, Step
from lit_llm.core.errors import UserError, noting, report
from lit_llm.ingest.source import public_name

# Steps that change text come before steps that remove documents, so that samples of removed documents are redacted too. Fast
# steps come before slow steps.
_STEPS = ("fix_encoding", "normalise", "secrets", "emails", "against", "languages", *QUALITY_RULES)


def _used(settings: CleanSettings) -> list[str]:
    return [name for name in _STEPS if getattr(settings, name) not in (None, False, ())]


def _action(settings: CleanSettings, name: str) -> str:
    if (action := getattr(settings, name)) not in ACTIONS:
        raise UserError(f"{name} is {action!r}, but must be {' or '.join(ACTIONS)} (--{name}).")
    return str(action)


def _rule(name: str, settings: CleanSettings) -> Rule:
    match name:
        case "fix_encoding":
            return FixEncoding()
        case "normalise":
            return normalise
        case "secrets":
            return Secrets(_action(settings, name))
        case "emails":
            return Emails(_action(settings, name))
        case "against":
            return Contamination(_index(settings), share=settings.against_share)
        case "languages":
            return Language(settings.languages, settings.language_confidence)
    return Quality(name)


def steps_of(settings: CleanSettings) -> list[Step]:
    """The steps that the settings switch on, in the order in which a document passes through the steps.

    Raises:
        UserError: A package is not installed, reference documents cannot be read, or all reference documents are too short.
    """
    return [Step(name, _rule(name, settings)) for name in _used(settings)]


def step_problems(settings: CleanSettings) -> list[str]:
    """One sentence for each value that a step refuses, and for each package that is missing. No document is read."""
    problems: list[str] = []
    for name in _used(settings):
        with noting(problems):
            if name == "against":  # its index needs the documents
                _references(settings)
            else:
                _rule(name, settings)
    with noting(problems):
        finders_of(settings)
    return list(dict.fromkeys(problems))  # several rules may lack one package


def _index(settings: CleanSettings) -> ReferenceIndex:
    """Make the index of the reference documents. A printed note says how many of these documents have too few words."""
    index = ReferenceIndex(_references(settings), n=settings.against_ngram)
    if not index.sources:
        names = ", ".join(map(public_name, settings.against))
        raise UserError(f"No document of {names} has {SHORTEST} words: nothing can be found (--against).")
    if index.too_short:
        total = index.too_short + len(index.sources)
        report(
            f"{index.too_short:,} of {total:,} documents of --against have fewer than {SHORTEST} words: not searched.", "note"
        )
    return index


def _references(settings: CleanSettings) -> References:
    return References(settings.against, text_key=settings.against_text_key)
