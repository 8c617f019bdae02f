"""Two CheckpointIO of Lightning for checkpoint folders: one saves in the foreground, one in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.callbacks._torch import process_count
from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.shared_verification import verify_shards_together
from lit_llm.checkpoint.snapshot import Snapshots, bytes_to_copy
from lit_llm.core.errors import UserError
from lit_llm.core.memory import COPY_FRACTION, free_host_bytes


class FolderCheckpointIO(CheckpointIO):
    """Saves a checkpoint as a folder with a manifest (`lit_llm.checkpoint.disk_format`); loads these and Lightning's files.

    A save that fails with an OSError (disk full, read-only, …) is reported in one warning, and the run goes on: earlier
    checkpoints are kept. `finished` tells callbacks how a save ended, so that they delete and link only after a good save.

    Lightning calls `save_checkpoint` and `remove_checkpoint` on rank 0 only, `load_checkpoint` on every rank. For a sharded
    checkpoint, every rank calls `save_checkpoint`, with its result of `sharded.split` as the checkpoint, and with the process
    group of the ranks as `storage_options`.

    Args:
        verified: A checkpoint that rank 0 has verified, so that `load_checkpoint` does not verify it again. Several ranks
            nevertheless hash its shards in `load_checkpoint`.
    """

    def __init__(self, verified: str | Path | None = None) -> None:
        self._verified = None if verified is None else Path(verified)
        self._failed: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint to the local folder `path`; return when it is on the disk, or a warning has said that it failed.

        `storage_options`: for a sharded checkpoint, the process group whose ranks write parts; else None."""
        self._try(Path(path), "saved", _write, checkpoint, path, storage_options)

    def finished(self, path: str | Path, *, wait: bool = False) -> bool | None:
        """How the last save to `path` ended. True: it is on the disk. False: it failed. None: a thread is still writing it.

        Only the main thread of rank 0 calls this. `wait`: wait for the background thread, so that the result is not None.
        """
        return Path(path) not in self._failed and Path(path).exists()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None, *, lazy: bool = False
    ) -> dict[str, Any]:
        """The checkpoint at rank 0's `path`, verified, on the CPU; always loaded with `weights_only=True`.

        Where a process group exists, all its ranks call this together. Rank 0 broadcasts its path, so that all ranks load the
        same checkpoint even if a link was changed meanwhile, and whether the checkpoint is damaged. Each rank hashes its share
        of the shards; rank 0 also hashes checkpoint.pt.

        The file is memory-mapped, so that ranks share its pages. On a CPU, the optimizer keeps using these pages: if the file
        is deleted later, its disk space is freed when the process ends.

        Raises:
            UserError: The checkpoint is missing, in another format, or damaged. All ranks raise it.
        """
        path = self._verify_together(Path(path))
        return disk_format.read(path, verify=False, lazy=lazy)

    def _verify_together(self, path: Path) -> Path:
        together = process_count() > 1
        problem = None
        if path != self._verified and (not together or dist.get_rank() == 0):
            problem = disk_format.damage(path, shards=not together)
        if together:
            choice: list[Any] = [path, problem]
            dist.broadcast_object_list(choice)
            path, problem = choice
        if problem is not None:
            raise UserError(problem)
        if together:
            verify_shards_together(path)
        return path

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the checkpoint at `path`. If that fails with an OSError, print a warning."""
        self._try(Path(path), "deleted", disk_format.remove, path)

    def _try(self, path: Path, how: Literal["saved", "deleted"], work: Callable, *args: Any) -> None:
        error = None
        try:
            work(*args)
        except OSError as caught:
            error = caught
        self._report(path, how, error)

    def _report(self, path: Path, how: Literal["saved", "deleted"], error: BaseException | None) -> None:
        """Warn if saving or deleting `path` failed with an OSError; raise other errors. Updates `_failed`, the failed saves."""
        if how == "saved":
            (self._failed.discard if error is None else self._failed.add)(path)
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        then = (
            " Training goes on and the checkpoints before it are kept; make room on the disk, or the run will end without newer"
            " ones."
        )
        why = error.strerror or error
        rank_zero_warn(f"Checkpoint {path} could not be {how}: {why}.{then if how == 'saved' else ''}")


class AsyncFolderCheckpointIO(FolderCheckpointIO):
    """A `FolderCheckpointIO` that writes in one background thread: training waits only for a copy of the checkpoint.

    The copy is in host memory, as large as the checkpoint, and the next save reuses that memory. A save waits for the previous
    save. Errors are raised on the main thread, in the next call of any method. `teardown` waits for the thread; Lightning
    calls it when a run ends, also after an error.

    Args:
        processes_to_fit: number of processes on this machine that copy. If at the first save their copies would take more than
            half of the machine's free memory, save in the foreground, with a warning. None: copy in any case.
    """

    def __init__(self, verified: str | Path | None = None, *, processes_to_fit: int | None = None) -> None:
        super().__init__(verified)
        self._processes_to_fit = processes_to_fit
        self._copies: bool | None = None if processes_to_fit else True  # None until the first save, when the size is known
        self._snapshots = Snapshots()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[tuple[Path, Literal["saved", "deleted"], Future[None]]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Wait for the previous save, and copy `checkpoint`. A background thread then writes the copy to the folder `path`. If
        copies would take too much memory (`processes_to_fit`), write at once, as the base class does."""
        self._collect(wait=True)  # the memory of the last copy is in use until then
        if self._copies is None:
            self._copies = self._copy_fits(checkpoint)
        if not self._copies:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._submit(Path(path), "saved", _write, self._snapshots.take(checkpoint), path, storage_options)

    def finished(self, path: str | Path, *, wait: bool = False) -> bool | None:
        self._collect(wait=wait)
        if any(job == Path(path) for job, *_ in self._jobs):
            return None
        return super().finished(path)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._collect(wait=True)
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint in the background thread, after earlier saves and deletions, because gigabytes take time."""
        self._submit(Path(path), "deleted", disk_format.remove, path)

    def teardown(self) -> None:
        """Wait until all checkpoints are on the disk, and free the memory of the copy. A later save starts a new thread."""
        try:
            self._collect(wait=True)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=True)
            self._thread, self._snapshots = None, Snapshots()

    def _copy_fits(self, checkpoint: dict[str, Any]) -> bool:
        needed, free = (self._processes_to_fit or 1) * bytes_to_copy(checkpoint), free_host_bytes()
        if needed <= COPY_FRACTION * free:
            return True
        rank_zero_warn(
            f"Checkpoints are saved in the foreground: copies for the background would take {needed / 1e9:,.1f} GB of host "
            f"memory on this machine, which is more than half of the {free / 1e9:,.1f} GB that are free "
            "(--async_checkpoints true copies nevertheless)."
        )
        return False

    def _submit(self, path: Path, how: Literal["saved", "deleted"], work: Callable, *args: Any) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs.append((path, how, self._thread.submit(work, *args)))

    def _collect(self, *, wait: bool) -> None:
        """For each finished save and deletion, in order: if it failed, warn or raise the error. `wait`: wait for all first."""
        while self._jobs and (wait or self._jobs[0][2].done()):
            path, how, future = self._jobs[0]
            error = future.exception()  # waits
            del self._jobs[0]
            self._report(path, how, error)


def _write(checkpoint: dict[str, Any], path: str | Path, group: Any) -> None:
    if group is None:
        disk_format.write(checkpoint, path)
    else:
        disk_format.write(checkpoint["rest"], path, parts=checkpoint["parts"], group=group)
