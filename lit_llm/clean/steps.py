"""The rules that settings ask for, in the order in which a document meets them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from lit_llm.clean.clean_settings import FORMAT, SHORTEST, CleanSettings
from lit_llm.clean.contamination import Contamination, ReferenceIndex, References
from lit_llm.clean.language import Language
from lit_llm.clean.normalise import FixEncoding, normalise
from lit_llm.clean.personal_data import ACTIONS, Emails, Secrets
from lit_llm.clean.quality import QUALITY_RULES, Quality
from lit_llm.clean.rules import Rule, Step
from lit_llm.core.disk import write_text
from lit_llm.core.errors import UserError, noting, report
from lit_llm.ingest.source import public_name

_INDEX = "against.npz"

# What changes the text comes before what judges it, so that samples of removed documents are redacted too. Of the judges, fast
# ones come first.
_STEPS: dict[str, str | None] = {
    **{"fix_encoding": "ftfy", "normalise": None, "secrets": "detect-secrets", "emails": None, "against": None},
    **{"languages": "py3langid", **dict.fromkeys(QUALITY_RULES, "datatrove")},
}
"""The steps in their order, and the package that decides."""


def _used(settings: CleanSettings) -> list[str]:
    return [name for name in _STEPS if getattr(settings, name) not in (None, False, ())]


def _action(settings: CleanSettings, name: str) -> str:
    if (action := getattr(settings, name)) not in ACTIONS:
        raise UserError(f"{name} is {action!r}, but must be {' or '.join(ACTIONS)} (--{name}).")
    return str(action)


def _rule(name: str, settings: CleanSettings, folder: Path) -> Rule:
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
            return Contamination(ReferenceIndex.load(folder / _INDEX), share=settings.against_share)
        case "languages":
            return Language(settings.languages, settings.language_confidence)
    return Quality(name)


def steps_of(settings: CleanSettings, folder: Path) -> list[Step]:
    """The steps, made in the process that uses them.

    Args:
        folder: where `prepare_steps` has left what the steps need.

    Raises:
        UserError: A package is not installed.
    """
    return [Step(name, _rule(name, settings, folder)) for name in _used(settings)]


def prepare_steps(settings: CleanSettings, folder: Path) -> list[str]:
    """Make what the steps of all workers need, in ``folder``. An interrupted call may have left it there.

    Returns:
        What identifies it: it differs if a rule can decide otherwise.

    Raises:
        UserError: Reference documents cannot be read, or all are too short.
    """
    packages = {package for name in _used(settings) if (package := _STEPS[name]) is not None}
    identity = [f"{package} {version(package)}" for package in sorted(packages)]
    return [*identity, _prepare_index(settings, folder)] if settings.against else identity


def step_problems(settings: CleanSettings) -> list[str]:
    """One sentence for each value that a step refuses, and for each package that is missing. No document is read."""
    found: list[str] = []
    for name in _used(settings):
        with noting(found):
            if name == "against":  # its index needs the documents
                _references(settings)
            else:
                _rule(name, settings, Path())
    return list(dict.fromkeys(found))  # several rules may lack one package


def _prepare_index(settings: CleanSettings, folder: Path) -> str:
    """Make the index of the reference documents, and identify it."""
    references = _references(settings)
    wanted = "\n".join([str(FORMAT), str(settings.against_ngram), *references.identity()])
    made_from = folder / f"{_INDEX}.txt"
    if not made_from.is_file() or made_from.read_text(encoding="utf-8") != wanted:
        made_from.unlink(missing_ok=True)
        index = ReferenceIndex.of_documents(references, n=settings.against_ngram)
        if not index.counts.size:
            names = ", ".join(map(public_name, settings.against))
            raise UserError(f"No document of {names} has {SHORTEST} words: nothing can be found (--against).")
        index.save(folder / _INDEX)
        write_text(made_from, wanted)
    index = ReferenceIndex.load(folder / _INDEX)
    if index.too_short:
        total = index.too_short + len(index.counts)
        report(
            f"{index.too_short:,} of {total:,} documents of --against have fewer than {SHORTEST} words: not searched.", "note"
        )
    return index.identity()


def _references(settings: CleanSettings) -> References:
    return References(settings.against, text_key=settings.against_text_key)
