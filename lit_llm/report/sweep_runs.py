"""The runs that `report --compare` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_llm.errors import UserError
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.run_folder import CONFIG, METRICS, expanded


def sweep_runs(named: Sequence[str]) -> tuple[list[LoadedRun], list[str]]:
    """(runs, sentences about those that cannot be read).

    Args:
        named: run folders, or folders of run folders.

    Raises:
        UserError: One of them is neither, or no run can be read.
    """
    paths = []
    for each in named:
        folder = expanded(each, key="compare", flag="--compare")
        if _is_run(folder):
            paths.append(folder)
            continue
        try:
            below = sorted(path for path in folder.iterdir() if _is_run(path))
        except OSError as error:
            raise UserError(f"{each} cannot be read: {error.strerror} (--compare)") from None
        if not below:
            raise UserError(f"{each} is no run folder, and no folder in it is one: there is no {CONFIG} (--compare)")
        paths += below
    runs, notes = [], []
    for path in paths:
        run = LoadedRun(path)
        try:
            _ = run.config, run.scalars, run.unread
        except UserError as error:
            notes.append(f"{path.name} is left out: {str(error).rpartition(' (--')[0] or error}.")
            continue
        runs.append(run)
    if not runs:
        raise UserError(f"none of the runs can be read: {notes[0]} (--compare)")
    return runs, notes


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / METRICS).is_file()
