"""The settings of `clean`. Every step is off by default."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from lit_llm.core.errors import noting
from lit_llm.core.number_domain import at_least, ranges_of, whole
from lit_llm.ingest.readers import ReadSettings

SHORTEST = 8
"""The fewest words of a reference document (``against``) that is searched for, and the smallest n of ``against_ngram``. GPT-3
had the same smallest n: shorter phrases occur in texts without being copied."""


def setting(default: Any, *, help: str, flag: str | None = None, step: str | None = None) -> Any:
    """Make a field of ``CleanSettings``.

    Args:
        help: the description of the setting in the list of flags.
        flag: the setting's name as a flag and in YAML. None: the name of the field.
        step: for a setting of a step, the name of the field that switches the step on. None: no field switches it on.
    """
    return field(default=default, metadata={"help": help, "flag": flag, "step": step})


@dataclass(frozen=True)
class CleanSettings:
    """The settings of `clean`: the documents to read, and the settings of each step."""

    paths: tuple[str, ...] = setting((), flag="data.paths", help="files, folders, globs or URLs")
    format: str = setting("auto", flag="data.format", help="auto, text, jsonl, parquet, arrow or tar")
    text_key: str = setting("text", flag="data.text_key", help="key or column of the text; dots descend")
    fix_encoding: bool = setting(False, help="repair text that was decoded with the wrong encoding: cafÃ© becomes café")
    normalise: bool = setting(False, help="Unicode NFC, \\n line ends, no control characters, no space at line ends")
    secrets: str | None = setting(None, help="redact: put <SECRET> in place of keys and passwords; remove: remove the document")
    emails: str | None = setting(None, help="redact: put <EMAIL> in place of e-mail addresses; remove: remove the document")
    against: tuple[str, ...] = setting(
        (), help="remove documents with n-grams of these files, or of val and test of a prepared folder"
    )
    against_text_key: str = setting("text", step="against", help="key or column of the text in these files")
    against_ngram: Annotated[int, whole(SHORTEST, 100)] = setting(13, step="against", help="words in the n-grams of against")
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
        128, step="near_duplicates", help="values in a MinHash signature, at most"
    )
    executor: str | None = setting(
        None, flag="executor", help="local, slurm or ray: run datatrove's pipeline with its executor, not this process"
    )
    executor_args: tuple[str, ...] = setting(
        (), step="executor", help="arguments of datatrove's executor: partition=cpu time=10:00:00"
    )
    tasks: Annotated[int, whole(1, 100_000)] = setting(100, step="executor", help="tasks that share the files, at most")
    workers: Annotated[int, whole(1, 4096)] = setting(1, step="executor", help="tasks that run at the same time")

    @classmethod
    def steps(cls) -> list[str]:
        """The names of the fields that switch a step on, in the order in which the fields are declared."""
        return [one.name for one in fields(cls) if one.metadata["step"] is None and one.metadata["flag"] is None]

    def read_settings(self) -> ReadSettings:
        return ReadSettings(self.format, self.text_key)

    def problems(self) -> list[str]:
        """One sentence for each setting that is missing, out of range, or set although its step is off."""
        said = []
        if not self.paths:
            said.append("No documents: give files, folders, globs or URLs (--data.paths).")
        for one in fields(self):
            value, switch = getattr(self, one.name), one.metadata["step"]
            if switch is not None and not getattr(self, switch) and value != one.default:
                said.append(f"{one.name} is {value}, but {switch} is off: switch it on (--{switch}), or leave {one.name} out.")
        sentences = [domain.problem(name, getattr(self, name)) for name, domain in ranges_of(CleanSettings).items()]
        out_of_range = [f"{problem}." for problem in sentences if problem is not None]
        with noting(said):
            self.read_settings()
        return said + out_of_range
