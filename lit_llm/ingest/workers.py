"""Run tasks in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.ingest.worker import Done, Failed, Progress

Run = Callable[..., Any]
"""Runs a task: takes its arguments and a report function. It is sent to the workers, and makes what it needs there."""

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Workers:
    """``count`` processes that run tasks; with 0, this process runs them. Use as a context manager: it ends the processes.

    Args:
        run: picklable; each process has a copy.
    """

    def __init__(self, count: int, run: Run) -> None:
        self._count, self._run = count, run
        self._started: dict[connection.Connection, subprocess.Popen[bytes]] = {}

    def run(self, tasks: Sequence[tuple[Any, ...]], report: Callable[[int, int], None]) -> Iterator[tuple[int, Any]]:
        """Number and result of each task, as they finish. Call it once.

        Args:
            report: takes the bytes of sources and of text that were read since the last call.

        Raises:
            UserError: A task raised it, or a process was killed.
        """
        if not self._count:
            for number, task in enumerate(tasks):
                yield number, self._run(*task, report)
            return
        waiting = iter(enumerate(tasks))
        running: dict[connection.Connection, int] = {}
        for _, (number, task) in zip(range(self._count), waiting, strict=False):
            pipe = self._start()
            self._send(pipe, task)
            running[pipe] = number
        while running:
            for ready in connection.wait(list(running)):
                assert isinstance(ready, connection.Connection)
                pipe = ready
                message = self._receive(pipe)
                if isinstance(message, Progress):
                    report(*message)
                    continue
                if isinstance(message, Failed):
                    if message.trace:
                        print(message.trace, file=sys.stderr)
                    raise message.error
                assert isinstance(message, Done)
                number = running.pop(pipe)
                if (following := next(waiting, None)) is not None:
                    running[pipe] = following[0]
                    self._send(pipe, following[1])
                yield number, message.result

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for pipe, process in self._started.items():
            if error is not None:
                process.kill()
            pipe.close()
            process.wait()

    def _start(self) -> connection.Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            # The module path as it is here: a user's tokenizer may lie in the folder of a script.
            paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from lit_llm.ingest.worker import main; main({theirs.fileno()})"],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | _ONE_THREAD | paths,
                )
            except OSError as error:
                said = f"A worker process cannot be started: {error.strerror}"
                raise UserError(f"{said}: use fewer --workers, or raise the limit of processes (ulimit -u).") from error
        self._started[ours] = process
        self._send(ours, self._run)
        return ours

    def _send(self, pipe: connection.Connection, message: object) -> None:
        try:
            pipe.send(message)
        except ConnectionError:
            raise self._ended(pipe) from None

    def _receive(self, pipe: connection.Connection) -> object:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            raise self._ended(pipe) from None

    def _ended(self, pipe: connection.Connection) -> Exception:
        code = self._started[pipe].wait()
        if code < 0:
            return UserError(
                f"A worker process was killed by signal {-code}, probably because memory ran out: use fewer --workers, and "
                "repeat the command to continue."
            )
        return RuntimeError(f"A worker process ended with exit code {code}; its output above says why.")
