"""Pass 2, in one process: which documents of all parts repeat an earlier one.

Equal documents: of those with the same hash, the first is kept. Near-duplicates: a document is removed if its signature is like
that of an earlier one that is kept.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from typing import NamedTuple

import numpy as np

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.document_parts import Parts
from lit_llm.clean.removal_report import SAMPLES, Count, Tally, sample_of
from lit_llm.clean.rules import Removed

_CHUNK = 2**20  # characters whose words are in memory at a time
_SPACE = re.compile(r"\s")


def find_duplicates(settings: CleanSettings, parts: Parts, tally: Tally) -> list[np.ndarray]:
    """For each part, which of its documents (n,) are kept: bool. What is removed is counted in ``tally``."""
    keep = np.ones(len(parts), dtype=bool)
    if settings.exact_duplicates:
        with tally.timed("exact_duplicates"):
            first = first_of_each(parts.wholes())
            repeats = np.flatnonzero(first != np.arange(len(first)))
            keep[repeats] = False
            _count("exact_duplicates", Repeats(repeats, first[repeats], None), parts, tally)
    if settings.near_duplicates is not None and settings.emit_datatrove is None:
        with tally.timed("near_duplicates"):
            found = near_duplicates(parts, settings.bands()[0], keep, settings.near_duplicates)
            keep[found.removed] = False
            _count("near_duplicates", found, parts, tally)
    tally.kept = Count(int(keep.sum()), int(parts.sizes[keep].sum()))
    return np.split(keep, parts.ends[1:-1])


def _count(step: str, found: Repeats, parts: Parts, tally: Tally) -> None:
    if not len(found.removed):
        return
    tally.step(step).removed[step] = Count(len(found.removed), int(parts.sizes[found.removed].sum()))
    tally.samples[step] = []
    for i in sorted(np.random.default_rng(0).permutation(len(found.removed))[:SAMPLES].tolist()):
        like = "equals" if found.similarity is None else f"{found.similarity[i]:.2f} like"
        removed, kept = (parts.document(int(numbers[i])) for numbers in (found.removed, found.kept))
        tally.samples[step].append(sample_of(Removed(step, f"{like} {kept.source}"), removed))


def whole_hash(text: str) -> bytes:
    """16 bytes that are equal for texts that differ in whitespace or in their Unicode form only."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    digest, start = hashlib.blake2b(digest_size=16), 0
    while start < len(text):
        space = _SPACE.search(text, start + _CHUNK)
        end = len(text) if space is None else space.end()
        words = text[start:end].split()
        digest.update(" ".join([*words, ""]).encode())
        start = end
    return digest.digest()


def first_of_each(hashes: np.ndarray) -> np.ndarray:
    """For each document, the number of the first with the same hash: its own if it is the first.

    Args:
        hashes: (n, 2) uint64, in the order of the documents.

    Returns:
        (n,) int64.
    """
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal hashes stay in the order of the documents
    ordered = hashes[order]
    starts = np.ones(len(order), dtype=bool)  # of runs of equal hashes
    starts[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first


class Repeats(NamedTuple):
    """Documents that repeat one that is kept, exactly or nearly."""

    removed: np.ndarray
    """(m,) int64: their numbers."""
    kept: np.ndarray
    """(m,) int64: of the documents that are kept before each, the most similar one."""
    similarity: np.ndarray | None
    """(m,) float64: the share of equal values in the two signatures. None: the documents are equal."""


def near_duplicates(parts: Parts, bands: int, looked_at: np.ndarray, threshold: float) -> Repeats:
    """Compare the documents that share a band, in their order.

    Similar to similar is not similar: if b repeats a, and c repeats b but not a, then c is kept.

    Args:
        looked_at: (n,) bool: which documents are compared.
        threshold: the share of equal values from which on a document is removed.
    """
    documents, groups = _sharing(parts, bands, np.flatnonzero(looked_at))
    numbers, starts = np.unique(documents, return_index=True)
    signatures = parts.signatures(numbers)
    enough = math.ceil(threshold * signatures.shape[1] - 1e-9)
    kept_of: dict[int, list[int]] = {}  # group → those that are kept, as places in `numbers`
    removed, kept, similarity = [], [], []
    for place, own in enumerate(np.split(groups, starts[1:]) if len(numbers) else []):
        candidates = sorted({other for group in own.tolist() for other in kept_of.get(group, ())})
        if candidates:
            equal = np.count_nonzero(signatures[candidates] == signatures[place], axis=1)
            best = int(equal.argmax())
            if equal[best] >= enough:
                removed.append(place)
                kept.append(candidates[best])
                similarity.append(equal[best] / signatures.shape[1])
                continue
        for group in own.tolist():
            kept_of.setdefault(group, []).append(place)
    return Repeats(numbers[np.array(removed, dtype=np.int64)], numbers[np.array(kept, dtype=np.int64)], np.array(similarity))


def _sharing(parts: Parts, bands: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of some documents, those (m,) that share a band, and the group (m,) that shares it, sorted by document.

    A document is in as many groups as it shares bands. One band is in memory at a time.
    """
    documents, groups, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for band in range(bands):
        hashes = parts.band(band)[numbers]
        order = np.argsort(hashes, kind="stable")
        equal = np.diff(hashes[order]) == 0
        as_before, as_after = np.append([False], equal)[: len(order)], np.append(equal, [False])[: len(order)]
        shared = as_before | as_after
        documents.append(numbers[order[shared]])
        groups.append(found + np.cumsum(~as_before[shared]))
        found += int(np.count_nonzero(~as_before[shared]))
    joined = np.concatenate(documents)
    by_document = np.argsort(joined, kind="stable")
    return joined[by_document], np.concatenate(groups)[by_document]
