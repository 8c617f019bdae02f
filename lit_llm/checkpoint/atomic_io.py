"""A checkpoint file is the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, fsync, rename; load with `weights_only=True` whatever the caller asked for.

    Lightning's own goes through $TMPDIR without fsync: across file systems a kill leaves a truncated file under the final name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        assert storage_options is None, "storage_options belong to remote file systems; this writes local files"
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")  # the leading dot keeps it out of *.ckpt
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself must survive a power cut
        finally:
            os.close(directory)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(path, map_location=map_location, weights_only=True)
