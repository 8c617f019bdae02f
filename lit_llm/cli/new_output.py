"""Output of a command: complete or absent, and nothing is overwritten unless the user says so. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lit_llm.checkpoint.crash_safe import delete, fsync_path, make_folder
from lit_llm.disk import NO_ROOM
from lit_llm.errors import UserError
from lit_llm.runs.run_folder import set_aside

REPLACE_HELP = "true: replace an existing file; rename an existing folder to <name>.1"


@contextlib.contextmanager
def new_file(out: Path, *, replace: bool, flag: str = "--out") -> Iterator[Path]:
    """A path to write to. It becomes `out` in one rename when the block ends, and is deleted if the block fails.

    Raises:
        UserError: `out` is a folder, or exists without `replace`; its folder cannot be made; the disk is full.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file ({flag})")
    _refuse_existing(out, replace=replace, flag=flag)
    with _partial(out, flag) as partial:
        make_folder(out.absolute().parent)
        yield partial
        fsync_path(partial)
        os.replace(partial, out)


@contextlib.contextmanager
def new_folder(out: Path, *, replace: bool, sources: Iterable[Path] = (), resumable: bool = False) -> Iterator[Path]:
    """A folder to write into. It becomes `out` when the block ends.

    Args:
        replace: Rename an existing folder to `<name>.1`, …, when the new one is complete.
        sources: What the command reads: `out` must not contain any of it.
        resumable: If the block fails, keep the folder, and give it to the next call. False: it is deleted.

    Raises:
        UserError: `out` is a file, or not empty without `replace`; it cannot be made; the disk is full.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder (--out)")
    for source in sources:
        if source.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out} contains {source}, which is read: give another folder (--out)")
    empty = out.is_dir() and not any(out.iterdir())
    if not empty:
        _refuse_existing(out, replace=replace, flag="--out")
    with _partial(out, "--out", keep=resumable) as partial:
        make_folder(partial)
        yield partial
        if not empty:
            set_aside(out)
        os.rename(partial, out)


def _refuse_existing(out: Path, *, replace: bool, flag: str) -> None:
    if os.path.lexists(out) and not replace:
        raise UserError(f"{out} exists already: give another name ({flag}), or replace it with --replace true")


@contextlib.contextmanager
def _partial(out: Path, flag: str, *, keep: bool = False) -> Iterator[Path]:
    """The hidden path beside `out`; unless kept, what a killed process left there is deleted."""
    partial = out.absolute().with_name(f".{out.absolute().name}.partial")
    try:
        if not keep:
            delete(partial)
        yield partial
        fsync_path(partial.parent)
    except BaseException as error:
        if not keep:
            delete(partial)
        with contextlib.suppress(OSError):
            partial.rmdir()  # if nothing was kept
        if isinstance(error, OSError) and (error.errno in NO_ROOM or not out.absolute().parent.is_dir()):
            raise UserError(f"{out} cannot be written: {error.strerror} ({flag})") from error
        raise
