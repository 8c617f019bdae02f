"""The exception for a user's mistake, functions that print mistakes, and functions that turn other errors into mistakes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import ModuleType

from lit_llm.callbacks.errors import UserError as UserError
from lit_llm.core.disk import is_disk_error
from lit_llm.core.ranks import is_first_here


def not_utf8(text: str) -> str | None:
    """A sentence that refuses `text`, an argument or file name whose bytes are not UTF-8; None if the bytes are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        return f"'{shown}' is not UTF-8 text: write it in UTF-8, and rename a file or folder of that name"
    return None


debug = False
"""Whether the traceback of each mistake is printed, too (`--debug`)."""


def show_traceback(error: UserError) -> None:
    """If `debug` is true, print the traceback of a user's mistake, with the exceptions that caused it."""
    if debug:
        traceback.print_exception(error)


unsaid: list[str] = []
"""Lines of errors that `report` did not print in this process, because the first process on its machine prints such lines."""


def report(message: str, kind: str = "error") -> None:
    """Print each line of `message` to stderr as "kind: line" in a machine's first process; others add errors to `unsaid`."""
    for line in message.splitlines():
        if is_first_here():
            print(f"{kind}: {line}", file=sys.stderr, flush=True)
        elif kind == "error":
            unsaid.append(f"{kind}: {line}")


def refuse(problems: Iterable[str]) -> None:
    """If there are problems, raise a UserError with all of them, one a line; if there are none, do nothing."""
    if lines := list(problems):
        raise UserError("\n".join(lines))


@contextlib.contextmanager
def noting(problems: list[str], flag: str | None = None) -> Iterator[None]:
    """Context manager that catches a UserError and appends its sentences to ``problems``, to report all mistakes together.

    Args:
        flag: a flag that is added to the end of each sentence. None: no flag is added.
    """
    try:
        yield
    except UserError as error:
        show_traceback(error)
        problems += [line if flag is None else with_flag(line, flag) for line in str(error).splitlines()]


def with_flag(sentence: str, flag: str) -> str:
    """Return a sentence with a flag in parentheses at its end: "… is missing (--data.path)."."""
    return f"{sentence.removesuffix('.')} ({flag})."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop; the error's class name if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Context manager that raises another library's error as a UserError. Errors of the disk are raised unchanged.

    Args:
        what: the beginning of the UserError's sentence; the reason follows after a colon.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        limit = failed_outside(error)
        if is_disk_error(error) or (limit is None and not isinstance(error, Exception)):
            raise
        raise UserError(f"{what}: {limit or first_line(error)[:300]}.") from error


def failed_outside(error: BaseException) -> str | None:
    """Return a text on the cause of `error` if it is a limit of the system, or a panic in a library's Rust code; else None."""
    said, number = first_line(error)[:300], getattr(error, "errno", None)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in said:
        return "there is not enough memory: see `ulimit -v` and the limits of control groups"
    if number in (errno.EAGAIN, errno.EMFILE, errno.ENFILE) or "can't start new thread" in said:
        return f"a limit of this system is too low, see `ulimit -a`: {said}"
    # A panic of Rust has no public class, and is no Exception.
    return f"a library has failed: {said}" if type(error).__name__ == "PanicException" else None


def need(module: str, *, what: str) -> ModuleType:
    """Import and return a module of an optional package, which only some features need.

    Args:
        what: the feature that needs the package, as the subject of the error's sentence: "Parquet".

    Raises:
        UserError: The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # a package that is installed but incomplete keeps its traceback
            raise
        with_more = "datatrove regex" if package == "datatrove" else package  # datatrove imports regex without requiring it
        raise UserError(f"{what} needs the package {package}: pip install {with_more}.") from error
