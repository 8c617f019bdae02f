"""manifest.json of a checkpoint folder: its files with sizes and checksums, and a checksum of itself.

damaged.json remembers that ranks found a changed shard, so that the next launch passes the checkpoint by. It chooses one before
its ranks are connected and does not hash shards then, so it would choose the same damaged one again and again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from lit_llm.checkpoint.crash_safe import fsync_path
from lit_llm.core.disk import read_json, read_ordinary, write_text
from lit_llm.core.errors import UserError

FORMAT = "lit_llm checkpoint"
VERSION = 2  # 1: no shards
DATA = "checkpoint.pt"
MANIFEST = "manifest.json"
DAMAGED = "damaged.json"
_SHARD = re.compile(r"shard-\d+-of-\d+\.pt")


def make_manifest(checkpoint: dict[str, Any], files: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint with these files, to be saved beside the others in `folder`."""
    # A counter of saves decides which checkpoint is newest. Clocks can go back. Steps can, too: a run that was resumed from an
    # early step on purpose must not continue from a later step of its former time line.
    serial = 1 + max((m["serial"] for p in folder.glob("*.ckpt") if (m := intact_manifest(p)) is not None), default=0)
    return {
        "format": FORMAT,
        "version": VERSION,
        "serial": serial,
        "step": checkpoint.get("global_step"),
        "tokens": checkpoint.get("tokens"),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "files": files,
    }


def versions() -> dict[str, str | None]:
    """Versions of the software that affects the numbers."""
    return {
        "lit_llm": _lit_llm_version(),
        "torch": str(torch.__version__),
        "lightning": importlib.metadata.version("lightning"),  # its import takes seconds
        "python": platform.python_version(),
    }


def _lit_llm_version() -> str | None:
    try:
        return importlib.metadata.version("lit_llm")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return None


def encode(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that contains its own checksum. Only these exact bytes are valid."""
    checksum = hashlib.sha256(json.dumps(manifest, indent=2).encode()).hexdigest()
    return (json.dumps({**manifest, "checksum": checksum}, indent=2) + "\n").encode()


def manifest_in(folder: Path) -> dict[str, Any]:
    """The manifest in a checkpoint folder, checked against its own checksum.

    Raises:
        UserError: It is missing, damaged, or of a later version of the format.
    """
    manifest = intact_manifest(folder)
    if manifest is None:
        raise UserError(_problem(folder))
    if manifest["version"] > VERSION:
        raise UserError(
            f"checkpoint {folder} has format version {manifest['version']}, this lit_llm reads versions up to {VERSION}: "
            "update lit_llm."
        )
    return manifest


def is_of_later_version(folder: Path) -> bool:
    """Whether a folder holds an intact manifest of a later version of the format."""
    manifest = intact_manifest(folder)
    return manifest is not None and manifest["version"] > VERSION


def intact_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in a folder, also of a later version; None if it is missing or damaged."""
    try:
        raw = read_ordinary(folder / MANIFEST)
        manifest = json.loads(raw)
        del manifest["checksum"]
        return manifest if encode(manifest) == raw and _is_well_formed(manifest) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_well_formed(manifest: dict[str, Any]) -> bool:
    """Whether every value that is read has its type. Of a later version only what is needed to find it."""
    version, serial, step = (manifest[name] for name in ("version", "serial", "step"))
    if manifest["format"] != FORMAT or type(version) is not int or type(serial) is not int or type(step) not in (int, NoneType):
        return False
    files = {} if version > VERSION else manifest["files"]
    known = all(name == DATA or _SHARD.fullmatch(name) for name in files)
    typed = all(type(entry["bytes"]) is int and type(entry["sha256"]) is str for entry in files.values())
    return version > VERSION or (known and typed and DATA in files and isinstance(manifest["versions"], dict))


def _problem(folder: Path) -> str:
    """Why `intact_manifest` returned None."""
    if not (folder / MANIFEST).is_file():
        if (folder / DATA).is_file():
            return f"checkpoint {folder} is damaged: {MANIFEST} is missing."
    elif (folder / DATA).is_file() or FORMAT.encode() in read_ordinary(folder / MANIFEST):
        return f"checkpoint {folder} is damaged: {MANIFEST} has changed since it was written."
    return f"{folder} is not a checkpoint of lit_llm: it has no {MANIFEST} of one."


def record_damage(folder: Path, problem: str) -> None:
    """Write the record into a checkpoint folder.

    Args:
        problem: What is wrong, as the end of a sentence.

    Raises:
        OSError: The disk is full or read-only, or the folder is gone.
    """
    write_text(folder / DAMAGED, json.dumps({"problem": problem}))
    fsync_path(folder)


def recorded_damage(folder: Path) -> str | None:
    """What the record of a checkpoint folder says, as a sentence. None if there is none, or it cannot be read."""
    try:
        problem = read_json(folder / DAMAGED)["problem"]
    except (OSError, ValueError, KeyError, TypeError):  # then the shards are hashed again
        return None
    return f"checkpoint {folder} is damaged: {problem} ({DAMAGED} remembers it, --resume {folder} checks it again)."
