"""From inputs to a folder of cleaned documents.

1. Each job is read by one process: the rules run over its documents, and what they keep is signed and written as a part.
2. This process finds duplicates among the signatures of all parts. The first in the order of the inputs is kept.
3. The lines that are kept are written, a part a process.

A job's result does not depend on the process or on other jobs, so any number of workers gives the same documents. A finished
job leaves a file named after everything that it depends on, so an interrupted run continues with the jobs that are missing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.document_parts import LINES, Parts, PartWriter, read_tally, write_tally
from lit_llm.clean.duplicates import find_duplicates, whole_hash
from lit_llm.clean.removal_report import READ, Count, Tally, write_report
from lit_llm.clean.rules import Document, Removed, Step, documents_of
from lit_llm.clean.steps import prepare_steps, steps_of
from lit_llm.clean.word_ngrams import Signer
from lit_llm.core.errors import UserError
from lit_llm.ingest.inputs import Input, Job, jobs_of
from lit_llm.ingest.progress import ProgressLog, Reading, Report
from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.token_parts import part_file, start_parts
from lit_llm.ingest.workers import finish


class ReadJob:
    """Work on jobs, one after the other, in one process.

    Args:
        folder: where parts are written.
    """

    def __init__(self, settings: CleanSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    @functools.cached_property
    def _steps(self) -> list[Step]:  # when the first job runs, in the process of the worker
        return steps_of(self._settings, self._folder)

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
                tally.read.add(Count(1, length))
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


class KeptLines(NamedTuple):
    """A part, and which of its lines are kept."""

    part: Path
    keep: np.ndarray
    """(n,) bool."""
    out: Path
    """The file of the output."""

    @property
    def size(self) -> int:
        """Bytes of the part's lines."""
        return self.part.stat().st_size


def write_lines(job: KeptLines, key: str, report: Report) -> None:
    """Write the kept lines."""
    reading, position = Reading(report), 0
    with open(job.part, "rb") as lines, part_file(job.out) as file:
        for line, keep in zip(lines, job.keep.tolist(), strict=True):
            if keep:
                file.write(line)
            position += len(line)
            reading.add(len(line), position)
    reading.end(position)


def clean(
    inputs: Sequence[Input], settings: CleanSettings, out: Path, *, workers: int = 0, progress: ProgressLog | None = None
) -> Tally:
    """Write ``part-00000.jsonl``, …, ``report.json`` and ``removed.jsonl`` into ``out``.

    Args:
        inputs: in the order of the output.
        out: an existing folder. The results of jobs are kept in ``out/parts``, which the caller deletes; a call with the same
            arguments uses those that an interrupted one left there. Everything else in ``out`` is deleted.
        workers: processes. 0: this process.

    Raises:
        UserError: A source cannot be read as text, or no document is left.
        OSError: The disk refused.
    """
    progress = progress or ProgressLog()
    parts = start_parts(out)
    identity = [*settings.identity(), *prepare_steps(settings, parts)]
    jobs = list(jobs_of(inputs))
    keys = [job.key(identity) for job in jobs]
    tallies = finish(
        jobs,
        keys,
        functools.partial(read_tally, parts),
        ReadJob(settings, parts).run,
        stage="Reading",
        workers=workers,
        progress=progress,
    )
    total = Tally()
    for tally in tallies:
        total.add(tally)
    keep = find_duplicates(settings, Parts(parts, keys, permutations=settings.near_permutations), total)
    if not total.kept.documents:
        raise UserError(f"None of {total.read.documents:,} documents is left: use fewer or weaker rules.")
    left = [(parts / f"{key}{LINES}", lines) for key, lines in zip(keys, keep, strict=True) if lines.any()]
    kept = [KeptLines(part, lines, out / f"part-{number:05d}.jsonl") for number, (part, lines) in enumerate(left)]
    finish(
        kept,
        [lines.out.name for lines in kept],
        lambda name: None,  # written anew: what an interrupted call has left is deleted
        write_lines,
        stage="Writing",
        workers=workers,
        progress=progress,
    )
    write_report(out, settings, total)
    return total
