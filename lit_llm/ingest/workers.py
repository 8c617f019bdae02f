"""Run the jobs that an interrupted run has not finished, in worker processes.

A worker is started with ``python -c``. A fresh process imports no torch and inherits no thread, so it is small. It ends when
its parent does, because the pipe breaks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, TypeVar

from lit_llm.core.errors import UserError
from lit_llm.ingest.progress import ProgressLog, Report

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Work(Protocol):
    """What one call of a worker does."""

    @property
    def size(self) -> int:
        """Bytes that are read."""


Job = TypeVar("Job", bound=Work)
Result = TypeVar("Result")


def finish(
    jobs: Sequence[Job],
    keys: Sequence[str],
    read: Callable[[str], Result | None],
    run: Callable[[Job, str, Report], Result],
    *,
    stage: str,
    workers: int,
    progress: ProgressLog,
    finished: Callable[[Job, Result], None] = lambda job, result: None,
) -> list[Result]:
    """The result of each job, in their order.

    Args:
        keys: names of the jobs' results.
        read: the result that an earlier run left under a key, or None.
        run: takes a job and its key, runs it, and leaves its result. It is sent to the workers, and makes what it needs there.
        stage: name of this work in the progress.
        workers: processes. 0: this process runs the jobs.
        finished: called with each job that this run finishes.

    Raises:
        UserError: A job raised it, or a process was killed.
    """
    results = {key: result for key in keys if (result := read(key)) is not None}
    missing = [(job, key) for job, key in zip(jobs, keys, strict=True) if key not in results]
    total = sum(job.size for job in jobs)
    with (
        progress.stage(stage, total=total, done=total - sum(job.size for job, _ in missing)) as report,
        Workers(min(workers, len(missing)), run) as processes,
    ):
        for (job, key), result in processes.run(missing, report):
            results[key] = result
            finished(job, result)
    return [results[key] for key in keys]


class Progress(NamedTuple):
    """Bytes of sources and of text that were read since the last message."""

    source: int
    text: int


class Outcome(NamedTuple):
    """What a task has returned or raised."""

    result: Any = None
    error: Exception | None = None


class Workers(contextlib.AbstractContextManager["Workers"]):
    """``count`` processes that run tasks; with 0, this process runs them. Use as a context manager: it ends the processes.

    Args:
        run: takes the arguments of a task and a report function. Each process has a copy.
    """

    def __init__(self, count: int, run: Callable[..., Any]) -> None:
        self._count, self._run = count, run
        self._started: dict[Connection, subprocess.Popen[bytes]] = {}

    def run(self, tasks: Sequence[tuple[Any, ...]], report: Report) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Each task and its result, as they finish. Call it once."""
        if not self._count:
            for task in tasks:
                yield task, self._run(*task, report)
            return
        waiting = iter(tasks)
        running: dict[Connection, tuple[Any, ...]] = {}
        for _, task in zip(range(self._count), waiting, strict=False):
            started = self._start()
            self._send(started, task)
            running[started] = task
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                with self._alive(pipe):
                    message = pipe.recv()
                if isinstance(message, Progress):
                    report(*message)
                    continue
                if message.error is not None:
                    raise message.error
                task = running.pop(pipe)
                if (following := next(waiting, None)) is not None:
                    running[pipe] = following
                    self._send(pipe, following)
                yield task, message.result

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for pipe, process in self._started.items():
            if error is not None:
                process.kill()
            pipe.close()
            process.wait()

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            # The module path as it is here: a user's tokenizer may lie in the folder of a script.
            paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from lit_llm.ingest.workers import main; main({theirs.fileno()})"],
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

    def _send(self, pipe: Connection, message: object) -> None:
        with self._alive(pipe):
            pipe.send(message)

    @contextlib.contextmanager
    def _alive(self, pipe: Connection) -> Iterator[None]:
        """Say how the process has ended if its pipe is broken."""
        try:
            yield
        except (EOFError, ConnectionError):
            code = self._started[pipe].wait()
            if code >= 0:
                raise RuntimeError(f"A worker process ended with exit code {code}; its output above says why.") from None
            raise UserError(
                f"A worker process was killed by signal {-code}, probably because memory ran out: use fewer --workers, and "
                "repeat the command to continue."
            ) from None


def main(descriptor: int) -> None:
    """A worker: run tasks until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    pipe = Connection(descriptor)

    def send(message: object) -> None:
        try:
            pipe.send(message)
        except ConnectionError:  # the parent is gone
            os._exit(1)

    with contextlib.suppress(EOFError, ConnectionError):
        run = pipe.recv()
        while True:
            arguments = pipe.recv()
            try:
                send(Outcome(run(*arguments, lambda source, text: send(Progress(source, text)))))
            except (UserError, OSError) as error:
                send(Outcome(error=error))
            except Exception as error:
                traceback.print_exc()
                send(Outcome(error=RuntimeError(f"{type(error).__name__}: {error}")))
