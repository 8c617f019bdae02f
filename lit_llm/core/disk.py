"""Writing small files whole, and telling an error of the disk from a bug. No torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lit_llm.callbacks.ordinary_files import *  # noqa: F403  # other rooms import these from here
from lit_llm.callbacks.ordinary_files import replace_file as write_bytes


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def real_path(path: str | os.PathLike[str]) -> Path:
    """`Path.resolve`, which before Python 3.13 raises RuntimeError where links go round in a circle."""
    return Path(os.path.realpath(path))


def delete(path: Path) -> None:
    """Delete a file, link or folder; errors are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)
