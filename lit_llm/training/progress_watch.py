"""A callback by which the processes of a run watch each other, so that no process waits for ever for a failed or stuck one.

Every second, a thread of each process publishes a report in a TCPStore: the number of training hooks that the process has
passed, and of collectives that it has begun. Rank 0 compares the reports. If no rank makes progress for `timeout` seconds, it
publishes a verdict: a sentence that names the rank that is behind. Every process then prints this sentence and ends. If rank 0
itself publishes no report, the other ranks end by themselves.

A process that fails publishes its failure. With gloo, other processes usually notice it, because the next collective raises.
With NCCL, or if the failed process cannot end, they do not notice. A training step does no more than count hooks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.callbacks._torch import process_count
from lit_llm.core._torch import collectives_begun, flight_record, last_collective
from lit_llm.core.ranks import has_agent_store
from lit_llm.training.bounded_exit import end
from lit_llm.training.lost_peer import is_lost_peer
from lit_llm.training.progress_judge import UNANSWERED, Judge, Place, no_progress

INTERVAL = 1.0
"""Seconds between two reports of a process; a quarter of the timeout, if that is less."""
PATIENCE = 20.0
"""Seconds that a process gets to end by itself after another process has failed. Then a thread of the process ends it."""
UNKNOWN, LAUNCHER = "another process", "the launcher (torchrun)"


class ProgressWatch(Callback):
    """Ends every process of a run that makes no progress, and prints which rank is behind.

    Also ends this process if another process has failed and this process does not notice it.

    A slow validation counts as progress as long as hooks are passed or collectives begin. A rank in one of the hooks
    `progress_judge.LONG` may work long without them, and counts as behind only if it publishes no reports.

    Contract:
        setup: with several processes, connects to the store and starts the threads. A collective.
        on_train_start: records the first step of this launch.
        hooks of batches, steps, validation and checkpoints: counts them.
        on_exception: writes into the store that this process has failed. The exception then ends the process.
        teardown: stops the threads.
        State: none.

    Put this callback before other callbacks.

    Args:
        timeout: seconds without progress after which the run is ended. None: a run without progress is not ended.
        folder: where each rank writes its latest collectives (collectives-rank-N.json) when the run is ended.
    """

    def __init__(self, timeout: float | None, folder: Path) -> None:
        self.timeout, self.folder = math.inf if timeout is None else timeout, folder
        self.interval = min(INTERVAL, self.timeout / 4)
        self._ended = threading.Event()
        self._store: dist.Store | None = None
        self._trainer: Trainer | None = None
        self._key, self._rank, self._ranks = "", 0, 1
        self._beats = self._hooks = self._first = self._step = self._micro_batch = 0
        self._hook, self._store_owner = "setup", "rank 0"  # the process that hosts the store
        self._progress, self._still = (0, 0), 0  # `_still`: beats of this process without progress
        self._judge = Judge(self.timeout, silence=max(3 * self.interval, 1.0))

    # -- where this process is ------------------------------------------------------------------------------------------

    def _pass(self, trainer: Trainer, hook: str) -> None:
        self._hooks += 1
        self._hook = "first step" if trainer.global_step == self._first else hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._step = trainer.global_step
        self._micro_batch, self._trainer = 0, trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1  # Lightning counts complete steps
        self._step, self._micro_batch = step, self._micro_batch + 1 if step == self._step else 1
        self._pass(trainer, "forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._pass(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._pass(trainer, "optimizer step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._pass(trainer, "end of the micro-batch")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._pass(trainer, f"validation batch {batch_idx + 1}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass(trainer, "end of validation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pass(trainer, "checkpoint")

    def place(self) -> Place:
        """Return a new report of this process: where it is in training now. Numbers reports: only one thread may call it."""
        self._beats += 1
        progress = self._hooks, collectives_begun()
        self._still = self._still + 1 if progress == self._progress else 0
        self._progress = progress
        latest = last_collective() if self._still * self.interval > self.timeout / 2 else None
        many = 1 if self._trainer is None else self._trainer.accumulate_grad_batches  # BatchRamp changes it between steps
        return Place(self._beats, *progress, self._step, self._micro_batch, many, self._hook, latest)

    # -- the processes ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if process_count() == 1:
            return
        key = trainer.strategy.broadcast(uuid.uuid4().hex)  # torchrun's store outlives a run
        with contextlib.suppress(RuntimeError, KeyError):  # the group was made without a TCP store
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, timeout=timedelta(seconds=30), wait_for_workers=False)
            self._key, self._rank, self._ranks = key, dist.get_rank(), dist.get_world_size()
            self._store_owner = LAUNCHER if has_agent_store() else "rank 0"
            self._hook, self._store, self._ended = "setup", store, threading.Event()
            self._judge = Judge(self.timeout, silence=max(3 * self.interval, 1.0))
            store.set(self._of(self._rank), json.dumps(self.place()))  # so that others know of this process from now on
            for target in (self._exchange, self._listen_for_0)[: 1 if self._rank == 0 else 2]:
                threading.Thread(target=target, args=(self._ended,), name="progress-watch", daemon=True).start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._store is not None and not is_lost_peer(exception):
            with contextlib.suppress(RuntimeError):  # the process that has the store is gone
                self._store.set(f"{self._key}/failed", f"rank {self._rank}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._ended.set()
        self._store = None

    def _exchange(self, ended: threading.Event) -> None:
        """Publish this process's reports until `ended` is set. Rank 0 also judges; others read the verdict. Runs in a thread.

        Ends this process after a verdict, and `PATIENCE` seconds after another process has failed.
        """
        store, judge = self._store, self._judge
        assert store is not None
        ranks = range(self._ranks) if self._rank == 0 else (0,)
        failed_since = math.inf
        while not ended.wait(self.interval):
            try:
                store.set(self._of(self._rank), json.dumps(self.place()))
                for rank, heard in self._read(store, ranks).items():
                    judge.hear(rank, heard)
                if self._rank == 0 and (verdict := judge.verdict()) is not None:
                    store.set(f"{self._key}/verdict", json.dumps(verdict))
                failed = self._failed(store)
                if store.check([f"{self._key}/verdict"]):
                    behind, sentence = json.loads(store.get(f"{self._key}/verdict"))
                    self._end(behind, sentence, ended)
            except RuntimeError:
                failed = self._store_owner
            failed_since = math.inf if failed in (None, f"rank {self._rank}") else min(failed_since, time.monotonic())
            if time.monotonic() - failed_since > PATIENCE and not ended.is_set():
                end(1, f"error: {failed} of this run has ended, and this rank waited for it: it ends now")

    def _listen_for_0(self, ended: threading.Event) -> None:
        """Until `ended` is set: end this process if it makes no progress and rank 0 publishes no reports.

        Runs in a second thread, because `_exchange` waits for ever for the store of a stopped rank 0.
        """
        before, since, began = (-1, -1), time.monotonic(), time.monotonic()
        while not ended.wait(self.interval):
            now, passed = time.monotonic(), (self._hooks, collectives_begun())
            if passed != before:
                before, since = passed, now
            if min(now - self._judge.heard.get(0, began), now - since) > self.timeout + 2 * self.interval:
                self._end(0, no_progress(self.timeout, f"rank 0 {UNANSWERED}"), ended)

    def _end(self, behind: int, sentence: str, ended: threading.Event) -> None:
        if ended.is_set():
            return
        os.write(2, f"error: rank {self._rank}: {sentence}\n".encode())
        with contextlib.suppress(OSError):
            self.folder.joinpath(f"collectives-rank-{self._rank}.json").write_bytes(flight_record())
        if self._rank == behind:
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self._rank == 0:
            ended.wait(3 * self.interval)  # the others read the verdict from this process
        os._exit(1)

    # -- a rank that has died ---------------------------------------------------------------------------------------------

    def lost(self) -> str:
        """Name of the process that has ended, such as "rank 3", or `UNKNOWN`. Call this after gloo's error for a lost process.
        Waits a few seconds, to see which rank publishes no new report."""
        store = self._store
        if store is None:
            return UNKNOWN
        try:
            if (failed := self._failed(store)) is not None:
                return failed
            before = self._read(store, range(self._ranks))
            time.sleep(2.5 * self.interval)
            after = self._read(store, range(self._ranks))
        except RuntimeError:
            return UNKNOWN if self._store_owner == f"rank {self._rank}" else self._store_owner
        silent = [rank for rank, place in before.items() if after[rank].beat == place.beat and rank != self._rank]
        return f"rank {silent[0]}" if len(silent) == 1 else UNKNOWN

    def _failed(self, store: dist.Store) -> str | None:
        key = f"{self._key}/failed"
        return store.get(key).decode() if store.check([key]) else None

    def _of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _read(self, store: dist.Store, ranks: Any) -> dict[int, Place]:
        """Rank → its latest report, for those of `ranks` that have published a report."""
        there = [rank for rank in ranks if store.check([self._of(rank)])]
        values = store.multi_get([self._of(rank) for rank in there]) if there else []
        return {rank: Place(*json.loads(value)) for rank, value in zip(there, values, strict=True)}
