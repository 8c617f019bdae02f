"""Run the jobs that an interrupted run has not finished, in worker processes.

A worker is started with ``python -c``. A fresh process imports no torch and inherits no thread, so it is small. When the parent
process ends, the pipe to the worker breaks, and the worker ends, too.
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
from typing import TypeVar

from lit_llm.core.errors import UserError
from lit_llm.ingest.inputs import Job
from lit_llm.ingest.progress import ProgressLog, Report

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Result = TypeVar("Result")
Run = Callable[[Job, str, Report], Result]
"""A function that takes a job, its key and a `Report`, stores the job's result under the key and returns it. Can be pickled."""


def finish(
    jobs: Sequence[Job],
    keys: Sequence[str],
    read: Callable[[str], Result | None],
    run: Run[Result],
    *,
    stage: str,
    workers: int,
    progress: ProgressLog,
    finished: Callable[[Job, Result], None] = lambda job, result: None,
) -> list[Result]:
    """Run all jobs that have no stored result, and return the results of all jobs, in the order of ``jobs``.

    Args:
        keys: for each job the name under which its result is stored.
        read: returns the result that an earlier run stored under a key, or None.
        run: runs one job.
        stage: the name of this work in the progress display.
        workers: number of processes. 0 or 1: this process runs the jobs.
        finished: called with each job that this call runs, and its result.

    Raises:
        UserError: A job raised a UserError, or a process was killed.
    """
    results = {key: result for key in keys if (result := read(key)) is not None}
    missing = [(job, key) for job, key in zip(jobs, keys, strict=True) if key not in results]
    total = sum(job.size for job in jobs)
    with progress.stage(stage, total=total, done=total - sum(job.size for job, _ in missing)) as report:
        here = ((job, key, run(job, key, report)) for job, key in missing)
        count = min(workers, len(missing))
        for job, key, result in _in_processes(missing, run, count, report) if count > 1 else here:
            results[key] = result
            finished(job, result)
    return [results[key] for key in keys]


def _in_processes(
    tasks: Sequence[tuple[Job, str]], run: Run[Result], count: int, report: Report
) -> Iterator[tuple[Job, str, Result]]:
    """Run tasks (job, key) in ``count`` processes, which end with the iteration. Yield (job, key, result) as jobs finish."""
    waiting = iter(tasks)
    processes: dict[Connection, subprocess.Popen[bytes]] = {}
    running: dict[Connection, tuple[Job, str]] = {}
    try:
        for _ in range(count):
            pipe, process = _start()
            processes[pipe] = process
            running[pipe] = next(waiting)
            with _alive(process):
                pipe.send(run)
                pipe.send(running[pipe])
        while running:
            ready = wait(list(running))
            for pipe in [each for each in running if each in ready]:
                with _alive(processes[pipe]):
                    kind, message = pipe.recv()
                if kind == "progress":
                    report(*message)
                elif kind == "error":
                    raise message
                else:
                    task = running.pop(pipe)
                    if (following := next(waiting, None)) is not None:
                        running[pipe] = following
                        with _alive(processes[pipe]):
                            pipe.send(following)
                    yield (*task, message)
    finally:
        for pipe, process in processes.items():
            if pipe in running:
                process.kill()
            pipe.close()
            process.wait()


@contextlib.contextmanager
def _alive(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Context manager: if the pipe to the worker ``process`` breaks, raise an error that says how the process has ended."""
    try:
        yield
    except (EOFError, ConnectionError):
        code = process.wait()
        if code >= 0:
            raise RuntimeError(f"A worker process ended with exit code {code}; its output above says why.") from None
        raise UserError(
            f"A worker process was killed by signal {-code}, probably because memory ran out: use fewer --workers, and "
            "repeat the command to continue."
        ) from None


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        # A worker gets the module path of this process: a user's tokenizer may lie in the folder of a script.
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
    return ours, process


def main(descriptor: int) -> None:
    """The main function of a worker process: run the jobs that come through the pipe ``descriptor``, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    pipe = Connection(descriptor)

    def send(kind: str, message: object) -> None:
        try:
            pipe.send((kind, message))
        except ConnectionError:  # the parent is gone
            os._exit(1)

    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or has no more jobs
        run = pipe.recv()
        while True:
            task = pipe.recv()
            try:
                send("result", run(*task, lambda source, text: send("progress", (source, text))))
            except (UserError, OSError) as error:
                send("error", error)
            except Exception as error:
                traceback.print_exc()
                send("error", RuntimeError(f"{type(error).__name__}: {error}"))
