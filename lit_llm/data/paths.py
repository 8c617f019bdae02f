"""Expand the paths a user gives (files, folders, globs) into a list of files."""

from __future__ import annotations

import glob
import os
from pathlib import Path


class MissingFiles(str):
    """A problem with a path that matches no file on this machine.

    `fit` refuses it like any other problem. `plan` needs no data, so it goes on without the size of the dataset.
    """


def expand(patterns: str | list[str], *, flag: str, folders: bool) -> tuple[list[Path], list[str]]:
    """Files that ``patterns`` name, each once, in the order of the patterns; the matches of one pattern are sorted.

    A pattern is a file, a glob (``**`` descends into folders), or, with ``folders``, a folder. A folder stands for every
    file below it that is not hidden and not inside a hidden folder. Empty files matched by a glob or a folder are skipped.

    Args:
        flag: the option that holds the patterns; problems name it.
        folders: whether a folder is allowed.

    Returns:
        The files, and one sentence for each pattern that cannot be used: a ``MissingFiles`` if nothing matches it.
    """
    files: dict[Path, None] = {}  # an ordered set
    problems: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            if path.stat().st_size == 0:
                problems.append(f"{pattern} is empty: give a file with content ({flag}).")
            files[path] = None
        elif path.is_dir() and not folders:
            problems.append(f"{pattern} is a folder: give a pattern such as {os.path.join(pattern, '*.bin')} ({flag}).")
        else:
            found = _below(path) if path.is_dir() else _glob(path)
            usable = [file for file in found if file.is_file() and file.stat().st_size > 0]
            if not usable:
                problems.append(MissingFiles(f"No non-empty file matches {pattern} ({flag})."))
            files.update(dict.fromkeys(usable))
    return list(files), problems


def _glob(pattern: Path) -> list[Path]:
    return sorted(Path(match) for match in glob.glob(str(pattern), recursive=True))


def _below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
