"""Pass 1: read the documents of a job, run the rules, and sign what they keep."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.document_parts import PartWriter, write_tally
from lit_llm.clean.duplicates import whole_hash
from lit_llm.clean.removal_report import READ, Tally
from lit_llm.clean.rules import Document, Removed, Step, documents_of
from lit_llm.clean.signatures import Signer
from lit_llm.clean.steps import steps_of
from lit_llm.ingest.inputs import Input, Job
from lit_llm.ingest.progress import Reading, Report
from lit_llm.ingest.readers import DocumentReader


class ReadJob:
    """Work on jobs, one after the other, in one process.

    Args:
        folder: where parts are written.
    """

    def __init__(self, settings: CleanSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    @functools.cached_property
    def _steps(self) -> list[Step]:  # when the first job runs, in the process of the worker
        return list(steps_of(self._settings, self._folder))

    @functools.cached_property
    def _signer(self) -> Signer | None:
        return self._settings.signer()

    def run(self, job: Job, key: str, report: Report) -> Tally:
        """Write the part ``key``.

        Raises:
            UserError: A source cannot be read as text.
            OSError: The disk refused.
        """
        names = [READ, *(step.name for step in self._steps)]
        started, tally = time.process_time(), Tally()
        for name in names:
            tally.step(name)
        with ExitStack() as stack:
            part = PartWriter(self._folder, key, stack)
            for one in job.inputs:
                for document in self._documents(one, tally, report):
                    kept = self._apply(document, tally)
                    if kept is not None:
                        self._add(kept, part, tally)
            if self._signer is not None:
                part.write_bands(self._settings.near_permutations, *self._settings.bands())
        others = sum(step.seconds for step in tally.steps.values())
        tally.step(READ).seconds = time.process_time() - started - others
        write_tally(self._folder, key, tally)
        return tally

    def _add(self, document: Document, part: PartWriter, tally: Tally) -> None:
        """Write a document with what duplicates of it will be found by."""
        whole = signature = None
        if self._settings.exact_duplicates:
            with tally.timed("exact_duplicates"):
                whole = whole_hash(document.text)
        if self._signer is not None:
            with tally.timed("near_duplicates"):
                signature = self._signer.sign(document.text)
        part.add(document, whole=whole, signature=signature)

    def _documents(self, one: Input, tally: Tally, report: Report) -> Iterator[Document]:
        """The documents of an input, counted and reported."""
        reading = Reading(report)
        with DocumentReader(one.source, one.settings) as reader:
            for document in documents_of(reader, name=one.source.name):
                length = len(document.text.encode())
                tally.read.add(1, length)
                tally.not_utf8 += not document.is_utf8
                reading.add(length, reader.position)
                yield document
            tally.without_text += reader.skipped
        reading.end(one.size)

    def _apply(self, document: Document, tally: Tally) -> Document | None:
        """The document after all rules; None if one removes it."""
        text = document.text
        for step in self._steps:
            with tally.timed(step.name) as count:
                result = step.rule(text)
            if isinstance(result, str) and not result.strip():
                result = Removed(f"{step.name}/nothing_left", "")
            if isinstance(result, Removed):
                tally.remove(step.name, result, document._replace(text=text))
                return None
            count.changed += result != text
            text = result
        return document._replace(text=text)
