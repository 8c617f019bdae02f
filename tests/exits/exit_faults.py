"""What these tests do to a run: a callback and a logger that fail at a chosen place, on one rank."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from lightning.pytorch import Callback

from lit_llm.checkpoint import crash_safe
from lit_llm.core.errors import UserError
from lit_llm.data import blocks

STEP = 3
"""The optimizer step in which a run fails; the recipe validates and saves after it."""


class Fault(Callback):
    """Does `kind` at `place`, on one rank. `step`: of those places that have one."""

    def __init__(self, place: str, kind: str, rank: int = 0, step: int = STEP) -> None:
        self.place, self.kind, self.rank, self.step = place, kind, rank, step
        self.done = False
        if place == "start" and int(os.environ.get("LOCAL_RANK", "0")) == rank:
            fail(kind, SimpleNamespace(default_root_dir="start"))

    def at(self, place: str, trainer: Any, step: int | None = None) -> None:
        step = self.step if step is None else step
        if place == self.place and trainer.global_rank == self.rank and trainer.global_step == step and not self.done:
            self.done = True
            fail(self.kind, trainer)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("setup", trainer, 0)
        if self.place == "reading" and trainer.global_rank == self.rank:
            read = blocks.TrainBlocks.rows
            calls = iter(range(10**9))

            def rows(data: Any, numbers: Any) -> Any:
                if next(calls) == 2:  # in each worker, or in the process itself
                    fail(self.kind, trainer)
                return read(data, numbers)

            blocks.TrainBlocks.rows = rows  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at("training", trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.at("validation", trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.at("save", trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("teardown", trainer, trainer.max_steps)


class SlowSaves(Callback):
    """Each file of a checkpoint takes half a second longer."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        crash_safe.open = self.slowly  # type: ignore[attr-defined]

    @staticmethod
    def slowly(path: Path, mode: str) -> Any:
        time.sleep(0.5)
        return open(path, mode)


def fail(kind: str, trainer: Any) -> None:
    if kind in RAISED:
        raise RAISED[kind]
    DONE[kind](trainer)


def _twice(trainer: Any) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def _delete(trainer: Any) -> None:
    shutil.rmtree(trainer.default_root_dir)


def _fill_the_disk(trainer: Any) -> None:
    """Every file of this process and of its later children ends after 64 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def _make_room(trainer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _kill_a_worker(trainer: Any) -> None:
    children = [p for p in Path("/proc").glob("[0-9]*") if (p / "stat").exists() and _parent(p) == os.getpid()]
    os.kill(int(children[0].name), signal.SIGKILL)


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def _leave_a_thread(trainer: Any) -> None:
    threading.Thread(target=time.sleep, args=(10**6,), name="stuck-thread").start()
    raise KeyError("broken")


RAISED: dict[str, BaseException] = {
    "KeyError": KeyError("broken"),
    "UserError": UserError("a setting does not fit (--a.key)"),
    "OSError": OSError(errno.EIO, os.strerror(errno.EIO)),
    "MemoryError": MemoryError(),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
}
DONE: dict[str, Any] = {
    "nothing": lambda trainer: None,
    "SIGTERM": lambda trainer: os.kill(os.getpid(), signal.SIGTERM),
    "SIGUSR1": lambda trainer: os.kill(os.getpid(), signal.SIGUSR1),
    "SIGINT": lambda trainer: os.kill(os.getpid(), signal.SIGINT),
    "SIGINT twice": _twice,
    "SIGKILL": lambda trainer: os.kill(os.getpid(), signal.SIGKILL),
    "the folder is deleted": _delete,
    "the disk is full": _fill_the_disk,
    "the disk has room": _make_room,
    "a worker is killed": _kill_a_worker,
    "KeyError, and a thread stays": _leave_a_thread,
    "sleeps": lambda trainer: time.sleep(10**6),
}


def overlay(folder: Path, name: str, *callbacks: tuple[str, dict[str, Any]]) -> list[str]:
    """Flags that add callbacks of this file to a run."""
    chosen = [{"class_path": f"exit_faults.{cls}", "init_args": arguments} for cls, arguments in callbacks]
    (folder / name).write_text(yaml.dump({"trainer": {"callbacks+": chosen}}))
    return ["--config", name]
