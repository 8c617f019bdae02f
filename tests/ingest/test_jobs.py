"""How inputs become jobs."""

from lit_llm.ingest.inputs import JOB_BYTES, Input, jobs_of
from lit_llm.ingest.source import Source


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
