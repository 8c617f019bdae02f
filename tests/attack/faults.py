"""Faults of the disk, injected into this process from the first write of one kind of file on.

| fault | what happens from then on |
|---|---|
| full | no file can grow: the kernel refuses (EFBIG, as ENOSPC of a full disk), also writers in C and Rust |
| read-only | files and folders below the working directory cannot be opened for writing, made, renamed or deleted (EROFS) |
| deleted | once: the folder of the file is deleted just before |
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

KINDS = {
    "events": r"events\.out\.tfevents",
    "metrics": r"metrics\.jsonl",
    "config": r"config\.yaml",
    "tokenizer": r"runs/mine/.*tokenizer\.json",
    "checkpoint": r"\.ckpt",
    "lock": r"lock\.json",
    "cache": r"/cache/",
    "plan": r"plan\.json",
    "export": r"out/\.?hf",
    "prepare": r"out/\.?shards",
    "pack": r"_pack-T",
    "mask": r"\.mask",
    "clean": r"out/\.?cleaned",
}
"""Kind of file → pattern of its path."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree", "os.link", "os.truncate"}


class Fault:
    """The fault that the audit hook injects, if any. Audit hooks cannot be removed, so there is one for all faults."""

    def __init__(self) -> None:
        self.name = ""
        self.pattern = re.compile("")
        self.folder = ""
        self.active = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.name or (event != "open" and event not in _CHANGES):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        path = os.path.abspath(os.fsdecode(args[0])) if isinstance(args[0], str | bytes | os.PathLike) else ""
        if not path.startswith(self.folder):
            return
        if not self.active and self.pattern.search(path):
            self._begin(path)
        if self.active and self.name == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def _begin(self, path: str) -> None:
        self.active = True
        if self.name == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.name == "deleted":
            name, self.name = self.name, ""  # deleting raises audit events too
            folder = Path(path).parent
            gone = folder.with_name(f"{folder.name}.gone")  # at once: a thread that appends to its file would keep the folder
            with suppress(OSError):  # it was never there
                shutil.rmtree(folder.rename(gone))
            self.name = name

    @contextmanager
    def injected(self, fault: str, kind: str) -> Iterator[None]:
        """Inject a fault at the first write of a kind of file below the working directory."""
        self.name, self.pattern, self.folder, self.active = fault, re.compile(KINDS[kind]), os.getcwd(), False
        try:
            yield
        finally:
            self.name = ""
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
