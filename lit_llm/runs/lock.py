"""The lock of a run folder: at most one `fit` writes into it.

The lock is the file `lock.json` in the folder, with process, host and time. The process that wrote the file, the owner, updates
the file's modification time every few seconds (the heartbeat), and deletes the file at the end. A killed process leaves the
file behind, so a launch that finds a lock.json has to know whether its owner still runs:

- Owner on the same machine (same boot, same PID namespace): it runs if its PID exists, is not a zombie and has the start time
  in the file. A reused PID has another start time. The heartbeat does not matter: a stopped process still owns its folder.
- Owner elsewhere: the owner runs if its heartbeat changes within `PATIENCE` seconds of watching. No clocks are compared.

A kernel lock (flock, fcntl) is not enough: the kernel releases it when a process dies, but it is unreliable across hosts. Some
file systems refuse it (Lustre without the `flock` mount option). Others exclude only processes of one host (BeeGFS by default,
Linux NFS with `local_lock`). Forked loader workers also inherit flock, and outlive a killed parent. So flock protects only the
moment in which lock.json is read and written. Where flock is not supported, two launches in the same millisecond may both
acquire the lock; `check` then stops one of the two before it saves a checkpoint.

Sources: flock(2), fcntl(2); proc(5), start time in field 22 of /proc/PID/stat; nfs(5), opening a file revalidates its
attributes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from lit_llm.core.disk import read_json
from lit_llm.core.errors import UserError

LOCK = "lock.json"
HEARTBEAT = 10.0
"""Seconds between two updates of the modification time of lock.json."""
PATIENCE = 60.0
"""Seconds without a heartbeat after which an owner on another machine is considered dead."""


class _Owner(NamedTuple):
    """Record of the owner of a lock: the entries of lock.json, and the file's modification time."""

    pid: int
    host: str
    machine: str
    """`_machine()` of the owner. Two processes with the same value see the same PIDs."""
    started: str
    """Start time of the process, in clock ticks since the machine's boot; "" without /proc."""
    since: str
    """Time at which the process acquired the lock, ISO 8601."""
    token: str
    """A random text that each `RunLock` chooses, and by which it recognises a lock.json that it wrote itself."""
    modified: int = 0
    """Modification time of lock.json in nanoseconds since 1970. It is not stored in the file."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class RunLock:
    """The lock of a run folder, for rank 0 of a `fit`. As a context manager, it is acquired on entry and released on exit."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LOCK
        self._token = uuid.uuid4().hex
        self._dead: _Owner | None = None  # an owner that was found not to run
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def refuse_if_held(self) -> None:
        """Check that no running process owns the lock. May wait `PATIENCE` seconds. Remembers a dead owner, for `acquire`.

        Raises:
            UserError: Another process owns the lock.
        """
        owner = _read(self.path)
        if owner is None or self._is_dead(owner):
            return
        running = _is_running(owner)
        if self._watch(owner) if running is None else running:
            raise UserError(
                f"run folder {self.run_dir} is in use by {owner}: stop that process, or write elsewhere with --run_dir DIR"
            )
        self._dead = owner

    def acquire(self) -> None:
        """Write lock.json, and start the heartbeat in a thread. The lock.json of a dead owner is replaced.

        Raises:
            UserError: Another process owns the lock, or the folder cannot be created.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run folder {self.run_dir} cannot be created: {error.strerror} (--run_dir DIR)") from None
        try:
            while not self._try_to_write():
                self.refuse_if_held()
        except OSError as error:
            raise UserError(f"run folder {self.run_dir} cannot be written: {error.strerror} (--run_dir DIR)") from None
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat, and delete lock.json if this object wrote it."""
        self._stop.set()
        if self._owns():
            with contextlib.suppress(OSError):  # a read-only disk; the next run takes over the lock of a dead process
                self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that no other process has taken over this process's lock. Called before a checkpoint is written.

        Raises:
            RuntimeError: Another process has taken the lock over, because this process had no heartbeat for `PATIENCE` s.
        """
        owner = _read(self.path)
        if owner is not None and owner.token != self._token:
            raise RuntimeError(
                f"run folder {self.run_dir} is now in use by {owner}, which found no sign of life of this process for "
                f"{PATIENCE:.0f} s. This process stops without saving."
            )

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_to_write(self) -> bool:
        """Write lock.json if no process, or a dead process, owns the lock. Returns whether the file was written."""
        with open(self.path, "a+", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without flock
                fcntl.flock(file, fcntl.LOCK_EX)
            if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                return False  # released, and perhaps acquired by another process, while this one waited
            owner = _read(self.path)
            if owner is not None and owner.token != self._token:
                if not self._is_dead(owner):
                    return False
                print(f"{owner} no longer runs: its lock of {self.run_dir} is taken over.", file=sys.stderr)
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            mine = _Owner(os.getpid(), socket.gethostname(), _machine(), _start_time(os.getpid()) or "", now, self._token)
            entries = {name: value for name, value in mine._asdict().items() if name != "modified"}
            file.truncate(0)
            os.write(file.fileno(), (json.dumps(entries, indent=2) + "\n").encode())  # unbuffered: closing writes nothing
            os.fsync(file.fileno())
        return True

    def _is_dead(self, owner: _Owner) -> bool:
        return self._dead == owner  # this compares modification times too: a heartbeat would show that the owner lives

    def _owns(self) -> bool:
        return (owner := _read(self.path)) is not None and owner.token == self._token

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                if self._owns():
                    os.utime(self.path)

    def _watch(self, owner: _Owner) -> bool:
        """Wait up to `PATIENCE` seconds for a heartbeat of an owner on another machine. Returns whether the owner runs."""
        print(f"{self.run_dir} is locked by {owner}; waiting up to {PATIENCE:.0f} s for a sign of life.", file=sys.stderr)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(min(0.5, PATIENCE / 4))
            now = _read(self.path)
            if now is None:
                return False
            if now != owner:
                return True
        return False


def sign_of_life(run_dir: Path) -> str:
    """A clause about the lock's owner: it runs, was killed or, if that is unknown, its last heartbeat. "": no lock."""
    owner = _read(run_dir / LOCK)
    if owner is None:
        return ""
    running = _is_running(owner)
    if running is None:  # only the machines' clocks can be compared
        ago = max(0.0, time.time() - owner.modified / 1e9)
        return f"{owner} updated {LOCK} {ago:,.0f} s ago; while it runs, it does so every {HEARTBEAT:.0f} s"
    return f"{owner} runs" if running else f"{owner} was killed: python -m lit_llm fit --run {run_dir} --resume auto continues"


def _read(path: Path) -> _Owner | None:
    """The owner that the lock.json at `path` names; None if the file is missing, or incomplete after its writer was killed."""
    try:
        return _Owner(**read_json(path))._replace(modified=path.stat().st_mtime_ns)
    except (OSError, ValueError, TypeError):
        return None


def _is_running(owner: _Owner) -> bool | None:
    """Whether the owner's process exists; None if that is unknown: the owner is on another machine, or there is no /proc."""
    if owner.machine != _machine():
        return None
    if owner.started:
        return _start_time(owner.pid) == owner.started
    return None  # a system without /proc: the PID may have been reused


def _machine() -> str:
    """A text that identifies the boot of this machine and the PID namespace. Without /proc, the host's name."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_time(pid: int) -> str | None:
    """Start time of a process, in clock ticks since boot; None if the process is a zombie or does not exist."""
    with contextlib.suppress(OSError):
        # The second field is the program's name in parentheses, which may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
