"""Near-duplicates: a document is removed if its signature is like that of an earlier one that is kept."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lit_llm.clean.document_parts import Parts


class Repeats(NamedTuple):
    """Documents that nearly repeat one that is kept."""

    removed: np.ndarray
    """(m,) int64: their numbers."""
    kept: np.ndarray
    """(m,) int64: of the documents that are kept before each, the most similar one."""
    similarity: np.ndarray
    """(m,) float64: the share of equal values in the two signatures."""


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
