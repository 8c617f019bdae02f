"""Writes small files as a whole, and tells errors of the disk from other errors. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lit_llm.callbacks.files import *  # noqa: F403  # other rooms import these from here
from lit_llm.callbacks.files import replace_file as write_bytes


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 by `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def real_path(path: str | os.PathLike[str]) -> Path:
    """Resolve a path. `Path.resolve` is not used, because before Python 3.13 it raises RuntimeError for links in a circle."""
    return Path(os.path.realpath(path))


def delete(path: Path) -> None:
    """Delete a file, link or folder; errors are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)
