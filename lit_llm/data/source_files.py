"""Which files a run was trained on, as a checkpoint keeps it, and which of them have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_llm.core.disk import open_ordinary

MAX_FILES = 1000
"""A checkpoint lists no more files than this."""

_SAMPLE = 2**18
"""Bytes that are read at the start, in the middle and at the end of a file. Shorter files are read whole."""


def describe_files(paths: Iterable[Path]) -> dict[str, str]:
    """Path → size and hash of each file; empty if there are more than MAX_FILES."""
    listed = list(dict.fromkeys(paths))
    return {} if len(listed) > MAX_FILES else {str(path): _identity(path) for path in listed}


def file_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What happened to each file: "a.txt has changed", "b.txt is gone", "c.txt is new". A file that only moved is unchanged."""
    same = set(before.values()) & set(now.values())
    changed = [f"{path} has changed" for path in before if path in now and before[path] != now[path]]
    gone = [f"{path} is gone" for path, identity in before.items() if path not in now and identity not in same]
    new = [f"{path} is new" for path, identity in now.items() if path not in before and identity not in same]
    return changed + gone + new


def _identity(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with open(open_ordinary(path), "rb") as file:
        if size <= 3 * _SAMPLE:
            digest.update(file.read())
        else:
            for start in (0, (size - _SAMPLE) // 2, size - _SAMPLE):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return f"{size} bytes {digest.hexdigest()}"
