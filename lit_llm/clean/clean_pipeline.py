"""Clean inputs in one process: each document passes the rules, then the search for duplicates. The documents that remain are
written to a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.duplicates import Finder, finders_of
from lit_llm.clean.removal_report import READ, Count, Tally, write_report
from lit_llm.clean.rules import Document, Removed, Step, documents_of
from lit_llm.clean.steps import steps_of
from lit_llm.core.errors import UserError
from lit_llm.ingest.inputs import JOB_BYTES, Input
from lit_llm.ingest.progress import ProgressLog, Reading, Report
from lit_llm.ingest.readers import DocumentReader


class _Lines(ExitStack):
    """Context manager that writes documents to ``part-00000.jsonl``, …, each of about ``JOB_BYTES``: one job of `prepare`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._parts = folder, 0
        self._file: BinaryIO | None = None

    def write(self, document: Document) -> None:
        if self._file is None:
            path = self._folder / f"part-{self._parts:05d}.jsonl"
            self._file = self.enter_context(path.open("wb"))
            self._parts += 1
        line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        if self._file.tell() >= JOB_BYTES:
            self.close()
            self._file = None


def clean(inputs: Sequence[Input], settings: CleanSettings, out: Path, *, progress: ProgressLog | None = None) -> Tally:
    """Clean documents: write ``part-00000.jsonl``, …, ``report.json`` and ``removed.jsonl`` into ``out``, and return counts.

    Args:
        inputs: the inputs, in the order in which their documents are written.
        out: an existing folder.

    Raises:
        UserError: A source cannot be read as text, or the rules remove every document.
        OSError: The disk is full, or refuses otherwise.
    """
    progress, tally = progress or ProgressLog(), Tally()
    steps, finders = steps_of(settings), finders_of(settings)
    for name in (READ, *(step.name for step in steps), *finders):
        tally.step(name)
    started = time.process_time()
    with progress.stage("Cleaning", total=sum(one.size for one in inputs)) as report, _Lines(out) as lines:
        for one in inputs:
            for document in _documents(one, tally, report):
                kept = _judged(document, steps, finders, tally)
                if kept is not None:
                    lines.write(kept)
                    tally.kept.add(Count(1, len(kept.text.encode())))
    others = sum(step.seconds for step in tally.steps.values())
    tally.step(READ).seconds = time.process_time() - started - others
    if not tally.kept.documents:
        removed = {rule: count for step in tally.steps.values() for rule, count in step.removed.items()}
        counts = ", ".join(f"{rule} removed {count.documents:,}" for rule, count in sorted(removed.items()))
        told = f" ({counts})" if counts else ""
        raise UserError(f"None of {tally.read.documents:,} documents is left{told}: use fewer or weaker rules.")
    write_report(out, settings, tally)
    return tally


def _documents(one: Input, tally: Tally, report: Report) -> Iterator[Document]:
    """Yield the documents of an input, count them in ``tally``, and report the bytes that were read."""
    reading = Reading(report)
    with DocumentReader(one.source, one.settings) as reader:
        for document in documents_of(reader, name=one.source.name):
            length = len(document.text.encode())
            tally.read.add(Count(1, length))
            tally.not_utf8 += not document.is_utf8
            reading.add(length, reader.position)
            yield document
        tally.without_text += reader.skipped
    reading.end(one.size)


def _judged(document: Document, steps: list[Step], finders: dict[str, Finder], tally: Tally) -> Document | None:
    """The document as the rules change it; None if a rule removes it, or it repeats an earlier document. Adds to ``tally``."""
    for step in steps:
        with tally.timed(step.name) as count:
            result = step.rule(document.text)
        if isinstance(result, str) and not result.strip():
            result = Removed(f"{step.name}/nothing_left", "")
        if isinstance(result, Removed):
            tally.remove(step.name, result, document)
            return None
        count.changed += result != document.text
        document = document._replace(text=result)
    for name, finder in finders.items():
        with tally.timed(name):
            repeats = finder(document)
        if repeats is not None:
            tally.remove(name, Removed(name, repeats), document)
            return None
    return document
