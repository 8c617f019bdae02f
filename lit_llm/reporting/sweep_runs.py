"""Find the runs for `report`: run folders of lit_llm, and folders that only a CSVLogger or TensorBoardLogger wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError
from lit_llm.core.number_text import counted
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.run_folder import CONFIG, CSV_METRICS, METRICS, expanded

_NOTHING = f"neither {CONFIG} nor {METRICS}, {CSV_METRICS} or TensorBoard's events"


def sweep_runs(named: Sequence[str]) -> tuple[list[LoadedRun], list[str]]:
    """Return (runs without duplicates, sentences about folders that are left out).

    Args:
        named: run folders, or folders of run folders.

    Raises:
        UserError: A folder in `named` is no run folder and contains no run folder, or no run can be read.
    """
    paths: list[Path] = []
    notes: list[str] = []
    for each in named:
        folder = expanded(each, key="compare", flag="--compare")
        if _is_run(folder):
            paths.append(folder)
            continue
        try:
            below = sorted(folder.iterdir())
        except OSError as error:
            raise UserError(f"{each} cannot be read: {error.strerror} (--compare)") from None
        folders = [path for path in below if _is_run(path)]
        deeper = [
            f"{path.name} is no run, but has {counted(many, 'run')} in it (--compare {path})"
            for path in below
            if (many := _below(path))
        ]
        if not folders:
            said = deeper[0] if deeper else f"there is {_NOTHING} (--compare)"
            raise UserError(f"{each} is no run folder, and no folder in it is one: {said}")
        notes += [f"{said}." for said in deeper]
        aside = [path for path in folders if _was_set_aside(path)]
        notes += [
            f"{path.name} is left out: a later run with --replace took its place (--compare {path} ranks it)." for path in aside
        ]
        paths += [path for path in folders if path not in aside]
    runs = []
    for path in {real_path(path): path for path in paths}.values():
        run = LoadedRun(path, of_lit_llm=False)
        try:
            _ = run.config, run.scalars, run.unread
        except UserError as error:
            notes.append(f"{path.name} is left out: {str(error).rpartition(' (--')[0] or error}.")
            continue
        runs.append(run)
    if not runs:
        raise UserError(f"none of the runs can be read: {notes[-1]} (--compare)")
    return runs, notes


def named_run(named: str) -> LoadedRun:
    """Return the run in the folder `named`.

    Raises:
        UserError: The folder is no run folder. The message says whether it contains run folders.
    """
    folder = expanded(named, key="run", flag="--run")
    if _is_run(folder):
        return LoadedRun(folder, of_lit_llm=False)
    many = _below(folder)
    if many:
        raise UserError(f"{named} is not a run folder, but has {counted(many, 'run')} in it (--compare {named})")
    raise UserError(f"{named} is not a run folder: it has {_NOTHING} (--run)")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (CONFIG, METRICS, CSV_METRICS)) or any(path.glob("*tfevents*"))


def _below(folder: Path) -> int:
    """Return the number of run folders in `folder`; 0 if `folder` is a run folder itself."""
    if _is_run(folder) or not folder.is_dir():
        return 0
    try:
        return sum(_is_run(path) for path in folder.iterdir())
    except OSError:
        return 0


def _was_set_aside(path: Path) -> bool:
    """Whether `path` is a run folder NAME that `fit --replace true` renamed to NAME.1, …: its setting run_dir is still NAME."""
    name, _, number = path.name.rpartition(".")
    if not number.isdecimal() or not name or not _is_run(path.with_name(name)):
        return False
    try:
        return Path(str(LoadedRun(path).config.get("run_dir"))).name == name
    except UserError:
        return False
