"""Reads, writes and deletes small files, and tells errors of the disk from other errors. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lit_llm.callbacks.files import *  # noqa: F403  # other rooms import these from here
from lit_llm.callbacks.files import replace_file as write_bytes


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8. The file is never left half written (`write_bytes`)."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path with links resolved. Raises no RuntimeError for links in a circle (`Path.resolve` may)."""
    return Path(os.path.realpath(path))


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its content. Errors of the disk are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)
