"""Pass 2, in one process: which documents of all parts repeat an earlier one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.document_parts import Parts
from lit_llm.clean.exact import first_of_each
from lit_llm.clean.near import near_duplicates
from lit_llm.clean.rules import Removed
from lit_llm.clean.tally import SAMPLES, Count, Tally, sample_of


def find_duplicates(settings: CleanSettings, parts: Parts, tally: Tally) -> list[np.ndarray]:
    """For each part, which of its documents (n,) are kept: bool. What is removed is counted in ``tally``."""
    keep = np.ones(len(parts), dtype=bool)
    if settings.exact_duplicates:
        with tally.timed("exact_duplicates"):
            first = first_of_each(parts.wholes())
            repeats = np.flatnonzero(first != np.arange(len(first)))
            keep[repeats] = False
            _count("exact_duplicates", repeats, first[repeats], lambda i: "equals", parts, tally)
    if settings.near_duplicates is not None and settings.emit_datatrove is None:
        with tally.timed("near_duplicates"):
            found = near_duplicates(parts, settings.bands()[0], keep, settings.near_duplicates)
            keep[found.removed] = False
            _count("near_duplicates", found.removed, found.kept, lambda i: f"{found.similarity[i]:.2f} like", parts, tally)
    tally.kept = Count(int(keep.sum()), int(parts.sizes[keep].sum()))
    return np.split(keep, parts.ends[1:-1])


def _count(step: str, removed: np.ndarray, kept: np.ndarray, detail: Callable[[int], str], parts: Parts, tally: Tally) -> None:
    """Count removed documents (n,), for which the documents ``kept`` (n,) stay.

    Args:
        detail: how the removed document of an index is like the one that stays.
    """
    if not len(removed):
        return
    tally.step(step).removed[step] = Count(len(removed), int(parts.sizes[removed].sum()))
    chosen = np.random.default_rng(0).permutation(len(removed))[:SAMPLES]
    tally.samples[step] = [
        sample_of(Removed(step, f"{detail(i)} {parts.document(int(kept[i])).source}"), parts.document(int(removed[i])))
        for i in sorted(chosen.tolist())
    ]
