"""How inputs become jobs, and how their processes end."""

import os
import signal
import subprocess

import pytest

from lit_llm.core.errors import UserError
from lit_llm.ingest.inputs import JOB_BYTES, Input, jobs_of
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.source import Source
from lit_llm.ingest.workers import finish


def sizes(*given: int) -> list[list[int]]:
    inputs = [Input(Source(f"s3://texts/{number}", size, ""), "train") for number, size in enumerate(given)]
    jobs = list(jobs_of(inputs))
    assert [part for job in jobs for part in job.inputs] == inputs
    return [[part.size for part in job.inputs] for job in jobs]


def test_small_inputs_share_a_job_and_a_job_has_one_input_of_unknown_size():
    half = JOB_BYTES // 2
    assert sizes(1, 2, 3) == [[1, 2, 3]]
    assert sizes(half, half, 1) == [[half, half], [1]]
    assert sizes(0, 0, 0) == [[0], [0], [0]]
    assert sizes(1, 0, 2, 0) == [[1, 0], [2, 0]]


def work(job, key, report):
    """What a worker does with each key."""
    if key == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if key == "refused":
        raise UserError("refused")
    if key == "broken":
        raise ConnectionResetError("of the job, not of the pipe")
    report(1, 2)
    return f"{key} {os.getpid()}"


def finished(*keys: str) -> list[str]:
    jobs = list(jobs_of([Input(Source(f"s3://texts/{key}", JOB_BYTES, ""), "train") for key in keys]))
    return finish(jobs, keys, lambda key: None, work, stage="Testing", workers=2, progress=ProgressLog())


def test_results_come_in_order_and_one_job_is_done_here():
    found = [one.split() for one in finished("a", "b", "c", "d")]
    assert [key for key, _ in found] == ["a", "b", "c", "d"]
    assert len({pid for _, pid in found} - {str(os.getpid())}) == 2
    assert finished("alone") == [f"alone {os.getpid()}"]


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        ("killed", UserError, "killed by signal 9.*--workers"),
        ("refused", UserError, "refused"),
        ("broken", OSError, "of the job"),
    ],
)
def test_a_job_that_fails_and_a_worker_that_is_killed_end_the_command(key, error, said):
    with pytest.raises(error, match=said):
        finished("a", key, "b")


def test_a_worker_that_cannot_be_started_is_one_sentence(monkeypatch):
    def limit(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", limit)
    with pytest.raises(UserError, match="cannot be started: Resource temporarily unavailable: use fewer --workers"):
        finished("a", "b")
