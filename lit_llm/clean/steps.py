"""The rules that settings ask for, in the order in which a document meets them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from lit_llm.clean.clean_settings import FORMAT, SHORTEST, CleanSettings
from lit_llm.clean.contamination import Contamination, ReferenceIndex, References
from lit_llm.clean.language import Language, unknown_languages
from lit_llm.clean.normalise import FixEncoding, normalise
from lit_llm.clean.personal_data import ACTIONS, Emails, Secrets
from lit_llm.clean.quality import QUALITY_RULES, Quality
from lit_llm.clean.rules import Step
from lit_llm.core.disk import write_text
from lit_llm.core.errors import UserError, noting, report

_INDEX = "against.npz"


def steps_of(settings: CleanSettings, folder: Path) -> Iterator[Step]:
    """The steps, made in the process that uses them.

    Args:
        folder: where `prepare_steps` has left what the steps need.

    Raises:
        UserError: A package is not installed.
    """
    # What changes the text comes before what judges it, so that samples of removed documents are redacted too. Of the
    # judges, fast ones come first.
    if settings.fix_encoding:
        yield Step("fix_encoding", FixEncoding())
    if settings.normalise:
        yield Step("normalise", normalise)
    if settings.secrets is not None:
        yield Step("secrets", Secrets(settings.secrets))
    if settings.emails is not None:
        yield Step("emails", Emails(settings.emails))
    if settings.against:
        index = ReferenceIndex.load(folder / _INDEX)
        yield Step("against", Contamination(index, share=settings.against_share))
    if settings.languages:
        yield Step("languages", Language(settings.languages, settings.language_confidence))
    for name in QUALITY_RULES:
        if getattr(settings, name):
            yield Step(name, Quality(name))


def prepare_steps(settings: CleanSettings, folder: Path) -> list[str]:
    """Make what the steps of all workers need, in ``folder``. An interrupted call may have left it there.

    Returns:
        What identifies it: it differs if a rule can decide otherwise.

    Raises:
        UserError: Reference documents cannot be read, or all are too short.
    """
    packages = {"py3langid": bool(settings.languages), "detect-secrets": settings.secrets is not None}
    packages["ftfy"] = settings.fix_encoding
    packages["datatrove"] = any(getattr(settings, name) for name in QUALITY_RULES)
    identity = [f"{package} {version(package)}" for package, used in packages.items() if used]
    return [*identity, _prepare_index(settings, folder)] if settings.against else identity


def _prepare_index(settings: CleanSettings, folder: Path) -> str:
    """Make the index of the reference documents, and identify it."""
    references = _references(settings)
    wanted = "\n".join([str(FORMAT), str(settings.against_ngram), *references.identity()])
    made_from = folder / f"{_INDEX}.txt"
    if not made_from.is_file() or made_from.read_text(encoding="utf-8") != wanted:
        made_from.unlink(missing_ok=True)
        index = ReferenceIndex.of_documents(references, n=settings.against_ngram)
        if not index.counts.size:
            raise UserError(
                f"No document of {', '.join(settings.against)} has {SHORTEST} words: nothing can be found (--against)."
            )
        index.save(folder / _INDEX)
        write_text(made_from, wanted)
    index = ReferenceIndex.load(folder / _INDEX)
    if index.too_short:
        total = index.too_short + len(index.counts)
        report(
            f"{index.too_short:,} of {total:,} documents of --against have fewer than {SHORTEST} words: not searched.", "note"
        )
    return index.identity()


def step_problems(settings: CleanSettings) -> list[str]:
    """One sentence for each value that a step refuses, and for each package that is missing. No document is read."""
    found: list[str] = []
    for name in ("secrets", "emails"):
        action = getattr(settings, name)
        if action not in (None, *ACTIONS):
            found.append(f"{name} is {action!r}, but must be {' or '.join(ACTIONS)} (--{name}).")
    if settings.against:
        with noting(found):
            _references(settings)
    if settings.languages:
        with noting(found):
            found += unknown_languages(settings.languages)
    with noting(found):
        if settings.fix_encoding:
            FixEncoding()
        if settings.secrets in ACTIONS:
            Secrets(settings.secrets)
        for name in QUALITY_RULES:
            if getattr(settings, name):
                Quality(name)
    return found


def _references(settings: CleanSettings) -> References:
    return References(settings.against, text_key=settings.against_text_key)
