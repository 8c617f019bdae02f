"""Calls a function in a process of its own, which may take so much processor time and memory, and no more.

A chat template is a program that comes with a downloaded folder. Jinja's sandbox keeps it away from files, but three nested
loops, `9 ** 99999999` or `'a' * 3000000000` never end or take all memory. Only another process can be stopped in each case.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 10
"""Processor time of a call. The slowest template in use takes milliseconds."""
MEMORY_BYTES = 2**29
"""Address space that the calls may add."""
_REPLY_BYTES = 2**23
"""More than two million tokens. The tokenizers library takes a hundred bytes for each byte of a text that it encodes."""


class Refused(Exception):
    """Why there is no result. `line` is that of a syntax error in the template."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


class LimitedProcess:
    """A function of this process, forked when it is first called. Arguments and results are JSON values.

    Raises:
        Refused: The function raised, or exceeded its limits.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._end: Callable[[], Any] | None = None

    def __call__(self, **arguments: Any) -> Any:
        if self._end is None:
            self._start()
        try:
            self._pipe.send_bytes(json.dumps(arguments).encode())
            reply = json.loads(self._pipe.recv_bytes(_REPLY_BYTES))
        except BaseException as error:  # also Ctrl-C: the reply that is still to come would be taken for the next one's
            assert self._end is not None
            self._end()
            self._end = None
            if not isinstance(error, OSError | EOFError):
                raise
            raise Refused(f"it takes more than {SECONDS} s, or writes more than {_REPLY_BYTES // 2**20} MB") from None
        if "error" in reply:
            raise Refused(**reply["error"])
        return reply["result"]

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        try:
            child = os.fork()
        except OSError as error:
            raise Refused(f"no process can be started for it: {error.strerror} (ulimit -u)") from None
        if child == 0:
            try:
                self._pipe.close()
                _serve(self._function, theirs)
            finally:
                os._exit(0)  # without the parent's exit handlers
        theirs.close()
        self._end = weakref.finalize(self, _stop, os.getpid(), child, self._pipe)


def _stop(parent: int, child: int, pipe: Connection) -> None:
    if os.getpid() == parent:  # not a fork of it
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        pipe.close()


def _serve(function: Callable[..., Any], pipe: Connection) -> None:
    """Answer requests until the parent closes the pipe or has ended: a fork of it may hold a copy of its end."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both: the parent may only end an answer
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # not everywhere
        _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES)
    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        request = json.loads(pipe.recv_bytes())
        _limit(resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + SECONDS)  # SIGXCPU ends it
        try:
            reply: Any = {"result": function(**request)}
        except MemoryError:
            reply = {"error": {"text": f"it takes more than {MEMORY_BYTES // 2**20} MiB"}}
        except Exception as error:  # a template is a program: whatever it raises is its answer
            reply = {"error": {"text": str(error)[:2000] or type(error).__name__, "line": getattr(error, "lineno", None)}}
        pipe.send_bytes(json.dumps(reply).encode())


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))
