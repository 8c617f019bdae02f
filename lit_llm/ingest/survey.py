"""Choose the documents to hold out, and make an index of them, before any document is tokenised."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_llm.ingest.inputs import Input, Job, jobs_of
from lit_llm.ingest.near_duplicates import HeldOutIndex, Sketcher
from lit_llm.ingest.progress import ProgressLog, Report
from lit_llm.ingest.selection import Selection, text_hash
from lit_llm.ingest.token_parts import part_file
from lit_llm.ingest.workers import finish

_FORMAT = 4
"""A number in the hash that names a stored result. Increment it when the same inputs would give another result."""


class Found(NamedTuple):
    """Record of what was found when the documents of one job were read to choose the documents that are held out."""

    documents: int
    """Number of documents that are held out because of the hash of their text, from inputs without a split."""
    smallest: float
    """The smallest `text_hash` of a document in inputs without a split; 1.0 if there is no such document."""
    sketches: list[np.ndarray]
    """The sketch (`Sketcher.sketch`) of each held-out document: uint64 (k,)."""


def select(
    inputs: Sequence[Input],
    folder: Path,
    *,
    val_fraction: float,
    drop_near_duplicates: bool,
    workers: int,
    progress: ProgressLog,
) -> Selection:
    """Read the inputs, and return the rules by which documents are held out for validation, or left out. If there are inputs
    without a split, at least one of their documents is held out.

    Args:
        folder: where the results of finished jobs are kept for a repeated call.
        val_fraction: share of the documents to hold out, in inputs without a split.
        drop_near_duplicates: whether training documents that nearly repeat a held-out document are left out.
        workers: number of processes. 0 or 1: this process does all the work.
    """
    undecided = any(part.split is None for part in inputs)
    if not undecided and not drop_near_duplicates:
        return Selection()
    selection = Selection(val_fraction)
    surveys = _survey(inputs, selection, folder, workers, progress)
    if undecided and not any(one.documents for one in surveys):
        selection = Selection(math.nextafter(min(one.smallest for one in surveys), 1.0))
        surveys = _survey(inputs, selection, folder, workers, progress)
    if not drop_near_duplicates:
        return selection
    index = HeldOutIndex([sketch for one in surveys for sketch in one.sketches])
    return Selection(selection.hold_out_below, index)


def _survey(inputs: Sequence[Input], selection: Selection, folder: Path, workers: int, progress: ProgressLog) -> list[Found]:
    jobs = list(jobs_of([part for part in inputs if part.split in (None, "val")]))
    keys = [job.key(["survey", str(_FORMAT), *selection.identity()]) for job in jobs]
    return finish(
        jobs,
        keys,
        functools.partial(_read, folder),
        functools.partial(_survey_job, selection, folder),
        stage="Choosing held-out text",
        workers=workers,
        progress=progress,
    )


def _read(folder: Path, key: str) -> Found | None:
    """The result of the job ``key`` that an earlier run stored in ``folder``; None if there is no such result."""
    try:
        with np.load(folder / f"{key}.npz") as saved:
            sketches = np.split(saved["sketches"], np.cumsum(saved["lengths"]))[:-1]  # after the last one is nothing
            return Found(int(saved["documents"]), float(saved["smallest"]), sketches)
    except FileNotFoundError:
        return None


def _survey_job(selection: Selection, folder: Path, job: Job, key: str, report: Report) -> Found:
    """Read the documents of a job: count and sketch those that ``selection`` holds out, and find the smallest hash of a text.
    Store the result in ``folder`` under ``key``, and return it."""
    documents, smallest = 0, 1.0
    sketches: list[np.ndarray] = []
    for part in job.inputs:
        sketcher = Sketcher()
        for piece in selection.pieces(part, report):
            if piece.first and part.split is None:
                smallest = min(smallest, text_hash(piece.text))
                documents += piece.split == "val"
            if piece.split != "val":
                continue
            sketcher.add(piece.text)
            if piece.last:
                sketches.append(sketcher.sketch())
                sketcher = Sketcher()
    survey = Found(documents, smallest, sketches)
    with part_file(folder / f"{key}.npz") as file:
        flat = np.concatenate([np.empty(0, np.uint64), *sketches])
        np.savez(file, **survey._asdict() | {"lengths": [len(sketch) for sketch in sketches], "sketches": flat})
    return survey
