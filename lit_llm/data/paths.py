"""Turn what the user wrote for a path (file, folder, glob, one or several) into a list of files."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def expand(patterns: str | list[str], *, flag: str, folders: bool) -> tuple[list[Path], list[str]]:
    """Files named by ``patterns``, each once, in the order given, a pattern's own matches sorted.

    A pattern is a file, a glob (``**`` goes through folders), or, with ``folders``, a folder: every file below it
    whose path has no part that begins with a dot. Empty files are left out if a glob or folder brought them in.

    Args:
        flag: the option the patterns came from, to name in problems.

    Returns:
        The files, and a sentence for each pattern that names nothing usable.
    """
    files: dict[Path, None] = {}  # a set that keeps its order
    problems = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            if path.stat().st_size == 0:
                problems.append(f"{pattern} is empty: {flag} needs files with something in them.")
            files[path] = None
        elif path.is_dir() and not folders:
            problems.append(f"{pattern} is a folder: give a pattern such as {os.path.join(pattern, '*.bin')} ({flag}).")
        else:
            found = _below(path) if path.is_dir() else _glob(path)
            usable = [file for file in found if file.is_file() and file.stat().st_size > 0]
            if not usable:
                problems.append(f"No file matches {pattern}, or all that do are empty ({flag}).")
            files.update(dict.fromkeys(usable))
    return list(files), problems


def _glob(pattern: Path) -> list[Path]:
    return sorted(Path(match) for match in glob.glob(str(pattern), recursive=True))


def _below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
