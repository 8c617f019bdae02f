"""The exception for a user's mistake, and how mistakes are printed."""

from __future__ import annotations

import os
import sys

from lit_llm.callbacks.errors import UserError as UserError


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
