"""Run the jobs that an interrupted run has not finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.workers import Run, Workers


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
    run: Run,
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
        run: takes a job and its key, runs it, and leaves its result (`Workers`).
        stage: name of this work in the progress.
        finished: called with each job that this run finishes.
    """
    results = {key: result for key in keys if (result := read(key)) is not None}
    missing = [(job, key) for job, key in zip(jobs, keys, strict=True) if key not in results]
    total = sum(job.size for job in jobs)
    with (
        progress.stage(stage, total=total, done=total - sum(job.size for job, _ in missing)) as report,
        Workers(min(workers, len(missing)), run) as processes,
    ):
        for number, result in processes.run(missing, report):
            job, key = missing[number]
            results[key] = result
            finished(job, result)
    return [results[key] for key in keys]
