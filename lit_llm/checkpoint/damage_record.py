"""damaged.json: remembers that ranks found a changed shard in a checkpoint, so that the next launch passes it by.

The launch chooses its checkpoint before its ranks are connected and does not hash shards then. Without this record it would
choose the same damaged one again and again.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from lit_llm.checkpoint.crash_safe import fsync_path
from lit_llm.core.disk import read_json, write_text

RECORD = "damaged.json"


def record_damage(folder: Path, problem: str) -> None:
    """Write the record into a checkpoint folder.

    Args:
        problem: What is wrong, as the end of a sentence.

    Raises:
        OSError: The disk is full or read-only, or the folder is gone.
    """
    write_text(folder / RECORD, json.dumps({"problem": problem}))
    fsync_path(folder)


def recorded_damage(folder: Path) -> str | None:
    """What the record of a checkpoint folder says, as a sentence. None if there is none, or it cannot be read."""
    try:
        problem = read_json(folder / RECORD)["problem"]
    except (OSError, ValueError, KeyError, TypeError):  # then the shards are hashed again
        return None
    return f"checkpoint {folder} is damaged: {problem} ({RECORD} remembers it, --resume {folder} checks it again)."


def clear_damage(folder: Path) -> None:
    """Delete the record of a checkpoint folder whose files are good again."""
    with contextlib.suppress(OSError):
        (folder / RECORD).unlink()
