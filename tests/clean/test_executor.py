"""`clean --executor`: datatrove's own executor runs its pipeline with the same settings, and continues what was interrupted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import loguru
import pytest
from clean.clean_runs import write

from lit_llm.__main__ import main
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.datatrove_pipeline import executor_problems

pytest.importorskip("datatrove")


@pytest.fixture(autouse=True)
def without_log():
    """datatrove logs to the stderr of the first test, which is closed after it."""
    yield
    loguru.logger.remove()


def text(seed: int, changed: float = 0.0) -> str:
    """Random words, of which a share is replaced."""
    draw, change = random.Random(seed), random.Random(seed + 1)
    words = [f"the{draw.randrange(10**6)}" for _ in range(200)]
    return " ".join(f"and{change.randrange(10**6)}" if change.random() < changed else word for word in words)


def kept(out: Path) -> list[int]:
    """The number of each document in its file. datatrove keeps one of several equal ones, not always the first."""
    lines = [line for part in out.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    return sorted(int(json.loads(line)["source"].rpartition(":")[2]) for line in lines)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_local_executor_keeps_what_clean_keeps_and_does_nothing_twice(tmp_path, capsys, workers):
    write(tmp_path / "a.jsonl", [f"{text(i)} with of me@x.org." for i in range(20)] + [None, "too short"])
    copies = [f"{text(i, 0.01 * (i < 5))}  with of me@x.org." for i in range(10)]
    write(tmp_path / "b.jsonl", [*copies, *[None] * 20, text(30) + " of the and"])
    words = ["clean", "--data.paths", str(tmp_path / "*.jsonl"), "--emails", "redact", "--gopher_quality", "true"]
    words += ["--exact_duplicates", "true", "--near_duplicates", "0.7"]
    assert main([*words, "--out", str(tmp_path / "here")]) == 0
    executor = [*words, "--executor", "local", "--workers", workers, "--out", str(tmp_path / "theirs")]
    assert main(executor) == 0
    expected = [*range(1, 21), 31]
    assert kept(tmp_path / "here") == kept(tmp_path / "theirs") == expected
    assert "<EMAIL>" in (tmp_path / "theirs/part-00000.jsonl").read_text()
    logs = tmp_path / "theirs/.datatrove/logs"
    assert json.loads((logs / "filter/stats.json").read_text())[-1]["stats"]["dropped"] == 1  # Gopher: too short
    before = (logs / "write/stats.json").stat().st_mtime_ns
    (tmp_path / "theirs/.datatrove/logs/write/completions/00001").unlink()  # as if the command had been killed there
    (tmp_path / "theirs/part-00001.jsonl").unlink()
    assert main(executor) == 0
    assert kept(tmp_path / "theirs") == expected and (logs / "write/stats.json").stat().st_mtime_ns > before
    capsys.readouterr()
    assert main([*executor, "--near_ngram", "3"]) == 2
    assert "theirs exists already, and not from this command" in capsys.readouterr().err


@pytest.mark.parametrize("step", [{"normalise": True}, {"secrets": "redact"}, {"emails": "remove"}, {"languages": ("en",)}])
def test_what_datatrove_lacks_is_refused_by_name(step):
    (problem,) = executor_problems(CleanSettings(("x",), executor="local", **step))
    (name,) = step
    assert problem.startswith(f"{name} does not run with --executor") and f"(--{name})" in problem


def test_arguments_of_an_executor_are_those_of_datatrove():
    def problems(executor: str, *arguments: str) -> list[str]:
        return executor_problems(CleanSettings(("x",), executor=executor, executor_args=arguments))

    assert problems("local") == problems("slurm", "time=10:00:00", "partition=cpu", "mem_per_cpu_gb=4") == []
    assert "missing a required argument: 'time' (--executor_args)" in problems("slurm", "partition=cpu")[0]
    assert "unexpected keyword argument 'sped' (--executor_args)" in problems("local", "sped=1")[0]
    assert problems("spark") == ["executor is 'spark', but must be one of local, slurm, ray (--executor)."]


def test_slurm_gets_the_stages_as_jobs_that_depend_on_each_other(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/submitted\necho Submitted batch job $$\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write(tmp_path / "a.jsonl", ["one two three"])
    words = ["clean", "--data.paths", str(tmp_path / "a.jsonl"), "--near_duplicates", "0.7", "--executor", "slurm"]
    assert main([*words, "--executor_args", "partition=cpu", "time=1:00:00", "--out", str(tmp_path / "out")]) == 0
    submitted = (tmp_path / "submitted").read_text()
    assert (submitted.count("--export"), submitted.count("afterok")) == (5, 4)  # filter, sign, pairs, clusters, write
    scripts = sorted((tmp_path / "out/.datatrove/logs").glob("*/launch_script.slurm"))
    assert len(scripts) == 5 and all("--partition=cpu" in script.read_text() for script in scripts)
