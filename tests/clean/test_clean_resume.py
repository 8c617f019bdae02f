"""The same bytes for any number of workers, after any kill, and without reading again what is finished."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from pathlib import Path

import fork_server
import pytest
from clean.clean_script import clean_folder
from ingest.corpus import write_formats
from kill_loop import run_with_kills

from lit_llm.clean import clean_pipeline

SCRIPT = Path(__file__).with_name("clean_script.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file of each format, and one that repeats some of their documents."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = write_formats(folder, count=10)
    repeated = [text for each in documents.values() for text in each[::3]]
    lines = (json.dumps({"text": f"{text} again" if i % 2 else text.replace(" ", "  ")}) for i, text in enumerate(repeated))
    (folder / "z.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """What one process makes of the corpus."""
    out = tmp_path_factory.mktemp("reference") / "out"
    clean_folder(corpus, out, 0)
    return contents(out)


def contents(out: Path) -> dict[str, object]:
    found: dict[str, object] = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    report = json.loads((out / "report.json").read_text())
    for step in report["steps"].values():
        step.pop("seconds")
    return found | {"report.json": report}


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_workers_writes_the_same_bytes(corpus, expected, tmp_path, workers):
    assert set(expected["report.json"]["steps"]["near_duplicates"]["removed"]) == {"near_duplicates"}
    assert set(expected["report.json"]["steps"]["exact_duplicates"]["removed"]) == {"exact_duplicates"}
    assert len([name for name in expected if name.startswith("part-")]) > 3
    clean_folder(corpus, tmp_path / "out", workers)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("at", [pytest.param("find_duplicates", marks=pytest.mark.slow), "write_report"])
def test_finished_jobs_are_not_read_again(corpus, expected, tmp_path, monkeypatch, at):
    def stop(*_args, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clean_pipeline, at, stop)
        with pytest.raises(KeyboardInterrupt):
            clean_folder(corpus, tmp_path / "out", 0)
    monkeypatch.setattr(clean_pipeline.ReadJob, "run", stop)
    clean_folder(corpus, tmp_path / "out", 0)
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("workers", "rules"), [(0, ""), pytest.param(2, "", marks=pytest.mark.soak), (2, "rules")])
def test_killed_again_and_again_it_ends_with_the_same_bytes(corpus, expected, tmp_path, workers, rules, cases):
    if rules:
        clean_folder(corpus, tmp_path / "reference", 0, rules=True)
        expected = contents(tmp_path / "reference")
        removed = expected["report.json"]["steps"]
        assert removed["against"]["removed"] and expected["report.json"]["kept"]["documents"] > 5
    draw, kills = random.Random(workers), 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for case in range(cases):
        out = tmp_path / f"out{case}"
        command = [sys.executable, str(SCRIPT), str(corpus), str(out), str(workers), rules]
        start = functools.partial(fork_server.Popen, command, env=environment, start_new_session=True)
        kills += run_with_kills(start, out, draw, most=20)  # about 100 files are made in all
        assert contents(out) == expected
    assert kills >= 3
