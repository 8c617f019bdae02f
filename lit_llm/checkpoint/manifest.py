"""manifest.json of a checkpoint folder: sizes and checksums of the folder's files, and a checksum of the manifest itself.

damaged.json records that ranks found a changed shard, so that the next launch skips this checkpoint. A launch chooses a
checkpoint before its ranks are connected, and hashes no shards then: without the record, it would choose this one again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lit_llm.checkpoint.crash_safe import fsync_path
from lit_llm.core.disk import read_json, write_text
from lit_llm.core.errors import UserError

FORMAT = "lit_llm checkpoint"
VERSION = 2
DATA = "checkpoint.pt"
MANIFEST = "manifest.json"
DAMAGED = "damaged.json"


def make_manifest(checkpoint: dict[str, Any], files: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The manifest, as a dict, of a checkpoint that is being written.

    Args:
        files: name → {"bytes": size, "sha256": hex} for each file of the checkpoint.
        folder: the folder with the run's earlier checkpoints. `serial`, the number of the save, is 1 more than their largest.
    """
    # A counter of saves decides which checkpoint is newest. Clocks can go back. Steps can, too: a run that was resumed from an
    # early step on purpose must not continue from a later step of its earlier course.
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
    """Package name → version, for the software that affects the numbers of a run. None: lit_llm is not installed."""
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
    """The bytes of manifest.json: `manifest` as JSON, with the SHA-256 of that JSON added as `checksum`."""
    checksum = hashlib.sha256(json.dumps(manifest, indent=2).encode()).hexdigest()
    return (json.dumps({**manifest, "checksum": checksum}, indent=2) + "\n").encode()


def manifest_in(folder: Path) -> dict[str, Any]:
    """The manifest in a checkpoint folder, as a dict, checked against the checksum that it contains.

    Raises:
        UserError: The manifest is missing, damaged, or of another version of the format.
    """
    manifest = intact_manifest(folder)
    if manifest is None:
        raise UserError(_problem(folder))
    if manifest["version"] != VERSION:
        raise UserError(f"checkpoint {folder} has format version {manifest['version']}, this lit_llm reads version {VERSION}.")
    return manifest


def intact_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in a checkpoint folder, as a dict without the checksum; None if manifest.json is missing or damaged."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        del manifest["checksum"]
        return manifest if encode(manifest) == raw and manifest["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _problem(folder: Path) -> str:
    """Why a checkpoint folder has no intact manifest, as a sentence."""
    if not (folder / MANIFEST).is_file():
        if (folder / DATA).is_file():
            return f"checkpoint {folder} is damaged: {MANIFEST} is missing."
    elif (folder / DATA).is_file() or FORMAT.encode() in (folder / MANIFEST).read_bytes():
        return f"checkpoint {folder} is damaged: {MANIFEST} has changed since it was written."
    return f"{folder} is not a checkpoint of lit_llm: it has no {MANIFEST} of one."


def record_damage(folder: Path, problem: str) -> None:
    """Write damaged.json into a checkpoint folder.

    Args:
        problem: what is damaged, as the end of a sentence.

    Raises:
        OSError: The disk is full or read-only, or the folder is gone.
    """
    write_text(folder / DAMAGED, json.dumps({"problem": problem}))
    fsync_path(folder)


def recorded_damage(folder: Path) -> str | None:
    """The damage that a folder's damaged.json records, as a sentence; None if that file is missing or cannot be read."""
    try:
        problem = read_json(folder / DAMAGED)["problem"]
    except (OSError, ValueError, KeyError, TypeError):  # then the shards are hashed again
        return None
    return f"checkpoint {folder} is damaged: {problem} ({DAMAGED} remembers it, --resume {folder} checks it again)."
