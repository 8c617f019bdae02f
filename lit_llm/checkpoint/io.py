"""How Lightning saves and loads our checkpoints: at once, or in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.checkpoint import format
from lit_llm.checkpoint.snapshot import Snapshots


class FolderCheckpointIO(CheckpointIO):
    """Saves checkpoints as folders with a manifest (`lit_llm.checkpoint.format`); loads those and plain Lightning files.

    A save that the disk refuses (full, read-only, …) is reported in one warning and the run goes on: whatever was on disk
    is still there. `finished` tells callbacks how a save ended, so that they delete and link only after a good one.

    Lightning calls `save_checkpoint` and `remove_checkpoint` on rank 0 only, `load_checkpoint` on every rank. For ranks that
    write their parts together, `save_checkpoint` takes on each of them what `sharded.split` gave, and their process group
    as `storage_options`.
    """

    def __init__(self) -> None:
        self._failed: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint to the local folder `path`; returns when it is on the disk, or reported as failed."""
        error = None
        try:
            _write(checkpoint, path, storage_options)
        except OSError as caught:
            error = caught
        self._report_save(Path(path), error)

    def finished(self, path: str | Path, *, wait: bool = False) -> bool | None:
        """How the last save to `path` ended: True on disk, False failed (and reported), None still being written.

        Ask on the main thread of rank 0. With `wait` the answer is never None.
        """
        return Path(path) not in self._failed and Path(path).exists()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None, *, lazy: bool = False
    ) -> dict[str, Any]:
        """The verified checkpoint at `path`; with `weights_only=True` whatever the caller asked for.

        It is mapped, not read, so that ranks share its pages. On a CPU the optimizer goes on using them: deleted later, the
        file gives its disk space back only when the process ends.

        Raises:
            UserError: it is missing, in someone else's format, or damaged.
        """
        return format.read(path, map_location=map_location or "cpu", lazy=lazy)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint; one that cannot be deleted is reported."""
        error = None
        try:
            format.remove(path)
        except OSError as caught:
            error = caught
        self._report_removal(Path(path), error)

    def _report_save(self, path: Path, error: BaseException | None) -> None:
        self._failed.discard(path)
        if error is None:
            return
        self._failed.add(path)
        if not isinstance(error, OSError):
            raise error
        rank_zero_warn(
            f"Checkpoint {path} could not be saved: {error.strerror or error}. Training goes on and the checkpoints before "
            "it are kept; make room on the disk, or the run will end without newer ones."
        )

    def _report_removal(self, path: Path, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            rank_zero_warn(f"Checkpoint {path} could not be deleted: {error.strerror or error}.")
        elif error is not None:
            raise error


class AsyncFolderCheckpointIO(FolderCheckpointIO):
    """The same checkpoints, written by one background thread: training waits only for a copy in host memory.

    Costs host memory of the size of one checkpoint, kept for the next save, which waits for the one before. Errors appear
    on the main thread, at the next call of any method here. `teardown`, which Lightning calls when a run ends in
    whatever way, waits for the thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._snapshots = Snapshots()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[tuple[Path, Callable[[Path, BaseException | None], None], Future[None]]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Copy a checkpoint and return; the thread writes it to the local folder `path`."""
        self._collect(wait=True)  # until then the copy's memory is in use
        self._submit(Path(path), self._report_save, _write, self._snapshots.take(checkpoint), path, storage_options)

    def finished(self, path: str | Path, *, wait: bool = False) -> bool | None:
        self._collect(wait=wait)
        if any(job == Path(path) for job, *_ in self._jobs):
            return None
        return super().finished(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None, *, lazy: bool = False
    ) -> dict[str, Any]:
        self._collect(wait=True)
        return super().load_checkpoint(path, map_location, weights_only, lazy=lazy)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, after what was asked for before; on the thread, since deleting gigabytes takes its time."""
        self._submit(Path(path), self._report_removal, format.remove, path)

    def teardown(self) -> None:
        """Wait until everything is on disk, and give the memory back. The next save starts anew."""
        try:
            self._collect(wait=True)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=True)
            self._thread, self._snapshots = None, Snapshots()

    def _submit(self, path: Path, report: Callable[[Path, BaseException | None], None], work: Callable, *args: Any) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs.append((path, report, self._thread.submit(work, *args)))

    def _collect(self, *, wait: bool) -> None:
        """Report the jobs that are done; they are done in the order they were asked for."""
        while self._jobs and (wait or self._jobs[0][2].done()):
            path, report, future = self._jobs[0]
            error = future.exception()  # waits
            del self._jobs[0]
            report(path, error)


def _write(checkpoint: dict[str, Any], path: str | Path, group: Any) -> None:
    if group is None:
        format.write(checkpoint, path)
    else:
        format.write(checkpoint["rest"], path, parts=checkpoint["parts"], group=group)
