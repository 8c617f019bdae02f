"""The exception for a user's mistake."""

from __future__ import annotations

import os
import sys


class UserError(ValueError):
    """A mistake in the input: one sentence a line, each with the value, the rule, and the flag or key that mends it.

    `python -m lit_llm` prints it without a traceback and exits with code 2. Any other exception is a bug and keeps
    its traceback.
    """


def is_user_error(error: BaseException) -> bool:
    """Whether `error` is a `UserError`, or a callback's `ConfigurationError`: `callbacks/` imports nothing of `lit_llm`."""
    callbacks = sys.modules.get("lit_llm.callbacks.errors")  # imported by whoever raised a ConfigurationError
    return isinstance(error, UserError) or (callbacks is not None and isinstance(error, callbacks.ConfigurationError))


def not_utf8(text: str) -> str | None:
    """Why a name or argument with placeholders for bytes that are not UTF-8 cannot be used. None if it has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        return f"'{shown}' is not UTF-8 text: write it in UTF-8, and rename a file or folder of that name"
    return None


unsaid: list[str] = []
"""Lines about mistakes that this process has left to the first one on its machine."""


def is_first_here() -> bool:
    """Whether this process is the first of a run on its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def report(message: str, kind: str = "error") -> None:
    """Print mistakes or notes to stderr, one a line. Of the processes of a run, only the first on each machine prints."""
    for line in message.splitlines():
        if is_first_here():
            print(f"{kind}: {line}", file=sys.stderr, flush=True)
        elif kind == "error":
            unsaid.append(f"{kind}: {line}")
