"""What `clean` does to the documents. Every step is off unless it is asked for."""

from __future__ import annotations

import json
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any

from lit_llm.clean.word_ngrams import Signer, bands_of
from lit_llm.core.errors import noting
from lit_llm.core.number_domain import at_least, ranges_of, whole
from lit_llm.ingest.readers import ReadSettings

FORMAT = 4
"""Part of the name of every result of a job. Increment it when the same documents and settings would give another one."""

SHORTEST = 8
"""Words that a document of ``against`` must have to be found. GPT-3's smallest n; a shorter phrase is common without being
copied."""


def setting(default: Any, *, help: str, flag: str | None = None, step: str | None = None, reads: bool = True) -> Any:
    """A field of ``CleanSettings``.

    Args:
        help: for the list of flags.
        flag: its name as a flag and in YAML, if not the field's.
        step: the field that switches the step on that this one belongs to.
        reads: whether the result of reading one document depends on it.
    """
    return field(default=default, metadata={"help": help, "flag": flag, "step": step, "reads": reads})


@dataclass(frozen=True)
class CleanSettings:
    """Documents to read, and the steps. ``problems`` says what is wrong with the values."""

    paths: tuple[str, ...] = setting((), flag="data.paths", reads=False, help="files, folders, globs or URLs")
    format: str = setting("auto", flag="data.format", reads=False, help="auto, text, jsonl, parquet, arrow or tar")
    text_key: str = setting("text", flag="data.text_key", reads=False, help="key or column of the text; dots descend")
    fix_encoding: bool = setting(False, help="repair text that was decoded with the wrong encoding: cafÃ© becomes café")
    normalise: bool = setting(False, help="Unicode NFC, \\n line ends, no control characters, no space at line ends")
    secrets: str | None = setting(None, help="redact: put <SECRET> in place of keys and passwords; remove: remove the document")
    emails: str | None = setting(None, help="redact: put <EMAIL> in place of e-mail addresses; remove: remove the document")
    against: tuple[str, ...] = setting(
        (), reads=False, help="remove documents with n-grams of these files, or of val and test of a prepared folder"
    )
    against_text_key: str = setting("text", step="against", reads=False, help="key or column of the text in these files")
    against_ngram: Annotated[int, whole(SHORTEST, 100)] = setting(
        13, step="against", reads=False, help="words in the n-grams of against"
    )
    against_share: Annotated[float, at_least(0, 1)] = setting(
        0.0, step="against", help="smallest part of the n-grams of a document of against; 0: any one"
    )
    languages: tuple[str, ...] = setting((), help="keep documents in these languages, as ISO 639 codes: en de")
    language_confidence: Annotated[float, at_least(0, 1)] = setting(
        0.5, step="languages", help="smallest probability of the language"
    )
    gopher_quality: bool = setting(False, help="Gopher's rules for English: words, symbols, bullets, stop words")
    gopher_repetition: bool = setting(False, help="Gopher's rules for repeated lines, paragraphs and n-grams")
    c4: bool = setting(False, help="C4's rules for English web pages, which also drop lines")
    exact_duplicates: bool = setting(False, help="keep the first of documents that are equal but for whitespace")
    # Below 0.3, nearly all pairs would have to be compared.
    near_duplicates: Annotated[float | None, at_least(0.3, 1)] = setting(
        None, help="keep the first of documents with this Jaccard similarity or more: 0.7"
    )
    near_ngram: Annotated[int, whole(1, 50)] = setting(5, step="near_duplicates", help="words in the n-grams that are compared")
    near_permutations: Annotated[int, whole(16, 1024)] = setting(
        128, step="near_duplicates", help="values in a MinHash signature"
    )
    emit_datatrove: str | None = setting(
        None, step="near_duplicates", help="write a script to this file that finds near-duplicates on a cluster, not here"
    )

    @classmethod
    def steps(cls) -> list[str]:
        """The fields that switch a step on, in the order of the steps."""
        return [one.name for one in fields(cls) if one.metadata["step"] is None and one.metadata["flag"] is None]

    def read_settings(self) -> ReadSettings:
        return ReadSettings(self.format, self.text_key)

    def signer(self) -> Signer | None:
        """What signs documents for ``near_duplicates``. None if they are not looked for here.

        Raises:
            UserError: The package rensa is not installed.
        """
        if self.near_duplicates is None or self.emit_datatrove is not None:
            return None
        return Signer(self.near_ngram, self.near_permutations)

    def bands(self) -> tuple[int, int]:
        """Bands of a signature, and values in a band."""
        assert self.near_duplicates is not None
        return bands_of(self.near_duplicates, self.near_permutations)

    def identity(self) -> list[str]:
        """Differs if reading one document with these settings can give another result."""
        used = {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["reads"] and self._used(one)}
        signer = self.signer()
        return [str(FORMAT), json.dumps(used), *([] if signer is None else signer.identity())]

    def _used(self, one: Field[Any]) -> bool:
        """Whether the step that a field belongs to is on."""
        return one.metadata["step"] is None or bool(getattr(self, one.metadata["step"]))

    def problems(self) -> list[str]:
        """One sentence for each value that is not allowed."""
        said = []
        if not self.paths:
            said.append("No documents: give files, folders, globs or URLs (--data.paths).")
        for one in fields(self):
            value = getattr(self, one.name)
            if not self._used(one) and value != one.default:
                switch = one.metadata["step"]
                said.append(f"{one.name} is {value}, but {switch} is off: switch it on (--{switch}), or leave {one.name} out.")
        found = [domain.problem(name, getattr(self, name)) for name, domain in ranges_of(CleanSettings).items()]
        out_of_range = [f"{problem}." for problem in found if problem is not None]
        for check in (self.read_settings, *([] if out_of_range else [self.signer])):
            with noting(said):
                check()
        return said + out_of_range
