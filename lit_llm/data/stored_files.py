"""Check whether files have changed: by size, ctime and inode at every start, and by a hash of the whole where these differ.

The state of a file, ``SIZE CTIME INODE``, changes with every write, and with a copy to another place. Whoever remembers
the state in which a file had its hash need not hash it again in that state. Checkpoints remember it for the files of a run's
tokens, and the token cache for its own files and the texts that it was made from.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lit_llm.core.number_text import counted
from lit_llm.ingest.shards import HASH_BYTES

_READ_BYTES = 2**24
_REST = 49  # seconds of rest after a second of hashing in the background: 2 % of one core, about 20 MB a second


class StoredFile(NamedTuple):
    """A file, and the content that it must have, as far as a manifest or another record says."""

    path: str
    blake2b: str | None = None
    """The hash that its bytes after the head must have. None: it is not known."""
    head: bytes = b""
    """The bytes that it begins with."""
    mend: str = ""
    """How a user mends a file that holds something else."""


Seen = dict[str, list[str]]
"""Path → the state of a file and, once it is known, the hash of its bytes after the head; else ""."""


def state_of(path: str) -> str:
    """The state of a file; empty if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_ctime_ns} {status.st_ino}"


def hash_of(path: str, head: bytes = b"", rest: Callable[[float], None] = lambda seconds: None) -> str:
    """The hash of a file's bytes after its head; of all bytes, if the file does not begin with ``head``.

    Args:
        rest: called after each read with the seconds that it took.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    with open(path, "rb", buffering=0) as file:
        begin = file.read(len(head))
        digest.update(b"" if begin == head else begin)
        start = time.perf_counter()
        while content := file.read(_READ_BYTES):
            digest.update(content)
            rest(time.perf_counter() - start)
            start = time.perf_counter()
    return digest.hexdigest()


def _confirmed_hash(file: StoredFile, rest: Callable[[float], None]) -> str:
    """The hash of a file, read again if it is not the one it must have.

    Python's queues of loader workers may close a descriptor twice when a loader ends, and so close this thread's.
    """
    try:
        digest = hash_of(file.path, file.head, rest)
        if file.blake2b in (None, digest):
            return digest
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
    return hash_of(file.path, file.head, rest)


class StoredFiles:
    """The files of a run's tokens, with their states when this was made."""

    def __init__(self, files: Iterable[StoredFile]) -> None:
        self._files: dict[str, StoredFile] = {}
        self.seen: Seen = {}
        self.add(files)

    def add(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            self._files[file.path] = file
            self.seen.setdefault(file.path, [state_of(file.path), ""])

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(int(state.split()[0]) for state, _ in self.seen.values() if state)

    @property
    def unlisted(self) -> int:
        """The number of files whose expected hash is not known."""
        return sum(file.blake2b is None for file in self._files.values())

    def recall(self, saved: Mapping[str, list[str]]) -> list[str]:
        """Take over the hashes of files that are still in a saved state, and return the paths of the other files."""
        changed = [path for path, (state, _) in self.seen.items() if path not in saved or saved[path][0] != state]
        self.seen |= {path: list(saved[path]) for path in self.seen.keys() - set(changed)}
        return changed

    def changes(self, saved: Mapping[str, list[str]], *, accepted: bool) -> list[str]:
        """Hash the files that are not in the state of a checkpoint. Return a sentence for each that has changed or is gone.

        Args:
            saved: the files of the checkpoint.
            accepted: files may differ from those of the checkpoint, unless a manifest has their hash.
        """
        if not saved:
            return []
        changed, folders = self.recall(saved), {os.path.dirname(path) for path in self._files}
        if changed:
            print(
                f"resume: comparing hashes of {counted(len(changed), 'file')} of the data, not in the state of the checkpoint"
            )
        for path in changed:
            before = saved.get(path, ["", ""])[1]
            if self._files[path].blake2b is None and before and not accepted:
                mend = "restore it, or continue with what it holds now (--accept_changes true)"
                self._files[path] = self._files[path]._replace(blake2b=before, mend=mend)
        gone = [path for path in saved if path not in self._files and os.path.dirname(path) in folders]
        lost = [] if accepted else [f"{path} is gone since the checkpoint: restore it" for path in gone if not state_of(path)]
        return [*lost, *self.problems(changed)]

    def problems(
        self, paths: Iterable[str] | None = None, rest: Callable[[float], None] = lambda seconds: None
    ) -> Iterator[str]:
        """Hash the files whose hash is not known. Yield a sentence for each that does not have the content that it must have.

        Args:
            paths: the files to check; None: all.
            rest: as in `hash_of`.
        """
        for path in list(self._files) if paths is None else paths:
            file = self._files[path]
            if self.seen[path][1]:
                continue
            try:
                state, digest = state_of(path), _confirmed_hash(file, rest)
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror or error}."
                continue
            if file.blake2b in (None, digest):
                self.seen[path] = [state, digest]
            else:
                yield f"{path} has changed: its blake2b is {digest}, not {file.blake2b}: {file.mend}."


class BackgroundCheck(threading.Thread):
    """Hashes the files of a run once while it trains. The thread does not keep the process from ending."""

    def __init__(self, files: StoredFiles) -> None:
        super().__init__(name="hashes of the data", daemon=True)
        self.problem: str | None = None
        self._files, self._stopped = files, threading.Event()
        self.start()

    def run(self) -> None:
        for problem in self._files.problems(rest=self._rest):
            self.problem = problem
            return

    def _rest(self, seconds: float) -> None:
        if self._stopped.wait(_REST * seconds):
            raise SystemExit  # ends this thread alone

    def stop(self) -> None:
        self._stopped.set()
