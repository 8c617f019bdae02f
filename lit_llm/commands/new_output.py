"""Writes the output files and folders of commands completely or not at all, and overwrites nothing without --replace true."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lit_llm.checkpoint.crash_safe import fsync_path, make_folder
from lit_llm.core.disk import NO_ROOM, delete, is_disk_error, real_path, set_aside, write_text
from lit_llm.core.errors import UserError

REPLACE_HELP = "true: replace an existing file; rename an existing folder to <name>.1"


@contextlib.contextmanager
def new_file(out: Path, *, replace: bool, flag: str = "--out") -> Iterator[Path]:
    """Yield a temporary path for the caller to write. When the block ends, the file is renamed to `out`; if it fails, deleted.

    Raises:
        UserError: `out` is a folder, or exists without `replace`; another process writes `out`; the disk refuses the file.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file ({flag})")
    with _partial(out, flag) as partial:
        _refuse_existing(out, replace=replace, flag=flag)
        yield partial
        fsync_path(partial)
        os.replace(partial, out)


def write_new(out: Path, text: str, *, replace: bool, flag: str = "--out") -> None:
    """Write a text to the file `out`, completely or not at all. Raise a UserError if `out` exists without `replace`."""
    with new_file(out, replace=replace, flag=flag) as partial:
        write_text(partial, text)


def new_file_if(out: Path | None, *, replace: bool, flag: str) -> contextlib.AbstractContextManager[Path | None]:
    """Return the context manager `new_file(out)`; if `out` is None, a context manager that yields None."""
    return contextlib.nullcontext() if out is None else new_file(out, replace=replace, flag=flag)


@contextlib.contextmanager
def new_folder(
    out: Path, *, replace: bool, sources: Iterable[Path] = (), above: Iterable[Path] = (), resumable: str | None = None
) -> Iterator[Path]:
    """Yield a temporary folder for the caller to write into. When the block ends, the folder is renamed to `out`.

    Args:
        replace: Rename an existing folder to `<name>.1`, …, when the new folder is complete.
        sources: Files and folders that the command reads: `out` must not contain any of these.
        above: Folders that the command reads with all their subfolders: `out` must not lie in such a folder.
        resumable: Name of a subfolder for finished steps. If the block fails and the subfolder is not empty, the temporary
            folder is kept, and the next call yields it again. When the block ends, the subfolder is deleted.

    Raises:
        UserError: `out` is a file, or a folder that is not empty, without `replace`; `out` contains a source or lies in one of
            `above`; another process writes `out`; the disk refuses the files.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder (--out)")
    for source in sources:
        if real_path(source).is_relative_to(real_path(out)):
            raise UserError(f"{out} contains {source}, which is read: give another folder (--out)")
    for folder in above:
        refuse_inside(out, folder, flag="--out")
    with _partial(out, "--out", keep=bool(resumable)) as partial:
        empty = out.is_dir() and not any(out.iterdir())
        if not empty:
            _refuse_existing(out, replace=replace, flag="--out")
        steps = partial / (resumable or "")
        if resumable and not steps.is_dir():
            delete(partial)  # left by a process that was killed between the renames below
        make_folder(partial)
        with _kept(partial, resumable) if resumable else contextlib.nullcontext():
            yield partial
        if not empty:
            set_aside(out)
        finished = partial.with_name(f"{partial.name}.finished")
        if resumable:
            delete(finished)
            os.rename(steps, finished)
        os.rename(partial, out)
        delete(finished)


@contextlib.contextmanager
def _kept(partial: Path, resumable: str) -> Iterator[None]:
    """If the `with` block fails and `partial` has finished steps, print that the command, repeated, continues from them."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            (partial / resumable).rmdir()  # if no step is finished
        if any(partial.iterdir()):
            first = "Mend the error, then repeat" if isinstance(error, UserError) else "Repeat"
            print(f"What is finished is kept in {partial}. {first} the command to continue.", file=sys.stderr)
        raise


@contextlib.contextmanager
def _lock(out: Path, flag: str) -> Iterator[None]:
    """Lock the path `out` for this process in a `with` block. A second process gets a UserError, where flock works."""
    path, refusal = _beside(out, "lock"), f"another process writes {out}: wait for it, or give another name ({flag})"
    with open(path, "w") as file:
        lock(file, refusal)
        if not (path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))):
            raise UserError(refusal)  # that process has just ended, and has deleted the file
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def lock(file: IO[Any], refusal: str) -> None:
    """Lock an open file by flock until it is closed. If it is locked already, close it and raise a UserError with `refusal`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(refusal) from None
    except OSError:  # a file system without locks
        pass


def log_beside(out: Path) -> Path:
    """Return the path of the log of the output folder `out`: a hidden file beside it, because commands may read the parent."""
    return _beside(out, "log")


def refuse_inside(out: Path, folder: Path, *, flag: str) -> None:
    """Refuse an output in a folder that the command reads.

    Raises:
        UserError: `out`, a new file or folder, would lie in `folder`.
    """
    if real_path(out).is_relative_to(real_path(folder)):
        raise UserError(f"{out} lies in {folder}, which is read: give a place outside of it ({flag})")


def _beside(out: Path, role: str) -> Path:
    return out.absolute().with_name(f".{out.absolute().name}.{role}")


def _refuse_existing(out: Path, *, replace: bool, flag: str) -> None:
    if os.path.lexists(out) and not replace:
        raise UserError(f"{out} exists already: give another name ({flag}), or replace it with --replace true")


@contextlib.contextmanager
def _partial(out: Path, flag: str, *, keep: bool = False) -> Iterator[Path]:
    """Yield a hidden path in the parent of `out`, locked for this process. If not `keep`, old content is deleted."""
    partial = _beside(out, "partial")
    try:
        make_folder(partial.parent)
        with _lock(out, flag):
            try:
                if not keep:
                    delete(partial)
                yield partial
                fsync_path(partial.parent)
            except BaseException as error:  # the error of torch.distributed.checkpoint is no Exception
                if not isinstance(error, UserError | KeyboardInterrupt) and getattr(error, "errno", None) is None:
                    _try_disk(partial.parent)
                raise
            finally:
                if not keep:
                    delete(partial)
                with contextlib.suppress(OSError):
                    partial.rmdir()  # if nothing was kept
    except OSError as error:
        is_ours = is_disk_error(error) and str(error.filename).startswith(str(_beside(out, "")))  # no user gave this name
        if isinstance(error, UserError) or not (is_ours or error.errno in NO_ROOM or not partial.parent.is_dir()):
            raise
        raise UserError(f"{out} cannot be written: {error.strerror} ({flag})") from error


def _try_disk(folder: Path) -> None:
    """Write a temporary file of 1 MB, to learn why C code could not write: its errors do not say so.

    Raises:
        OSError: The disk refuses the file.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1_000_000))
        file.flush()
        os.fsync(file.fileno())
