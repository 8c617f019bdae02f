"""Check whether files have changed: compare size, ctime and inode at every start, and hash files where one of them differs.

The state of a file, the text ``SIZE CTIME INODE``, changes with every write, and when the file is copied to another place. A
file that is still in the state in which it was hashed need not be hashed again. Therefore checkpoints store the states and
hashes of a run's token files, and the token cache stores those of its own files and of the tokenised texts.
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
_REST = 49  # seconds of sleep after each second of hashing in the background: 2 % of one core, about 20 MB a second


class StoredFile(NamedTuple):
    """A file, and the content that it must have according to a manifest, a checkpoint or another record."""

    path: str
    blake2b: str | None = None
    """The BLAKE2b hash (hex) that the file's bytes after ``head`` must have. None: any content is accepted."""
    head: bytes = b""
    """The bytes with which the file must begin, such as the header of a shard. These bytes are not hashed."""
    mend: str = ""
    """The end of the error message for a file with other content: what the user can do, such as "restore it"."""


Seen = dict[str, list[str]]
"""Path → [state, hash] of a file. The hash covers the bytes after ``StoredFile.head``; "" as long as it is not known."""


def state_of(path: str) -> str:
    """The state of a file, ``SIZE CTIME INODE``; empty if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_ctime_ns} {status.st_ino}"


def hash_of(path: str, head: bytes = b"", rest: Callable[[float], None] = lambda seconds: None) -> str:
    """The BLAKE2b hash (hex) of a file's bytes after ``head``. If the file does not begin with ``head``, all bytes are hashed.

    Args:
        rest: called after each 16 MiB with the seconds that reading and hashing took. May sleep, to slow hashing down.

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
    """The BLAKE2b hash (hex) of a file, from a second attempt if the first hash is wrong or its descriptor was closed.

    The reason: when a DataLoader ends, the queues of its workers may close a descriptor number twice. The second time, the
    number may already belong to the file that this thread reads.
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
    """A set of files to check for changes.

    ``seen``: path → [state, hash]: the file's size, ctime and inode when it was added, and its hash ("" until it is known)."""

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
        """The sum of the sizes of all files, in bytes."""
        return sum(int(state.split()[0]) for state, _ in self.seen.values() if state)

    @property
    def unlisted(self) -> int:
        """The number of files of which no manifest or other record gives a hash, so that any content is accepted."""
        return sum(file.blake2b is None for file in self._files.values())

    def recall(self, saved: Mapping[str, list[str]]) -> list[str]:
        """Copy to ``seen`` the saved hash of each file whose state (size, ctime, inode) is as saved. Return all other paths."""
        changed = [path for path, (state, _) in self.seen.items() if path not in saved or saved[path][0] != state]
        self.seen |= {path: list(saved[path]) for path in self.seen.keys() - set(changed)}
        return changed

    def changes(self, saved: Mapping[str, list[str]], *, accepted: bool) -> list[str]:
        """Hash the files whose state (size, ctime, inode) is not the checkpoint's, and return the problems.

        There is one sentence for each file that has changed, is gone or cannot be read. Printed lines say how many files are
        hashed, and how many are accepted because neither the checkpoint (a short run may end before all files are hashed) nor
        a manifest has their hash.

        Args:
            saved: path → [state, hash] in the checkpoint. Empty: no file is compared.
            accepted: True: files may differ from the checkpoint's. A file must still have the hash that a manifest gives.
        """
        if not saved:
            return []
        changed, folders = self.recall(saved), {os.path.dirname(path) for path in self._files}
        if changed:
            print(
                f"resume: comparing hashes of {counted(len(changed), 'file')} of the data, not in the state of the checkpoint"
            )
        unknown = [path for path in changed if self._files[path].blake2b is None and not saved.get(path, ["", ""])[1]]
        if unknown:
            print(f"resume: no checkpoint or manifest has a hash of {counted(len(unknown), 'file')} of these: accepted")
        for path in changed:
            if self._files[path].blake2b is None and path not in unknown and not accepted:
                before = saved[path][1]
                mend = "restore it, or continue with what it holds now (--accept_changes true)"
                self._files[path] = self._files[path]._replace(blake2b=before, mend=mend)
        gone = [path for path in saved if path not in self._files and os.path.dirname(path) in folders]
        lost = [] if accepted else [f"{path} is gone since the checkpoint: restore it" for path in gone if not state_of(path)]
        return [*lost, *self.problems(changed)]

    def problems(
        self, paths: Iterable[str] | None = None, rest: Callable[[float], None] = lambda seconds: None
    ) -> Iterator[str]:
        """Hash each file that has no hash in ``seen``. Store the hash there if it is right, else yield a sentence on the file.

        Args:
            paths: the files to check; None: all files of this object.
            rest: called while files are hashed, as in `hash_of`.
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
    """A daemon thread that hashes a run's data files once during training, and stops at the first file that has changed.

    ``problem``: a sentence about that file; None as long as no file is wrong."""

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
