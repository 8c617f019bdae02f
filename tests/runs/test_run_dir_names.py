"""Where the files of a run are if its folder's name has variables, `~` or a dash."""

import os
from pathlib import Path

import pytest
from recipe_runs import run

from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import expanded

FILES = {"config.yaml", "tokenizer.json", "hparams.yaml", "checkpoints", "metrics.jsonl"}


@pytest.fixture
def places(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("PLACE", str(folder / "place"))
    monkeypatch.setenv("NESTED", "$PLACE/nested")
    monkeypatch.delenv("UNSET", raising=False)
    return folder


def files_outside(folder: Path, run_dir: Path) -> list[str]:
    """New files that are not in the run folder."""
    ours = {folder / "text.txt", folder / "tiny.yaml", folder / "named.yaml"}
    found = [path for path in folder.rglob("*") if path.is_file() and path not in ours]
    return [str(path) for path in found if not (path.is_relative_to(run_dir) or path.is_relative_to(folder / "cache"))]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("$PLACE/x", "place/x"),
        pytest.param("${PLACE}/x", "place/x", marks=pytest.mark.slow),
        pytest.param("$NESTED", "place/nested", marks=pytest.mark.slow),
        pytest.param("~/x", "home/x", marks=pytest.mark.slow),
        pytest.param("-dash", "-dash", marks=pytest.mark.slow),
        pytest.param("./~root", "~root", marks=pytest.mark.slow),
        pytest.param("a b$", "a b$", marks=pytest.mark.slow),
    ],
)
def test_every_file_of_a_run_is_in_the_one_folder(places, capsys, name, where):
    (places / "named.yaml").write_text(f"run_dir: '{name}'\ntrainer: {{max_steps: 2}}\n")
    assert run(capsys, "fit", "--config", "tiny.yaml", "--config", "named.yaml")[0] == 0
    run_dir = places / where
    names = {path.name for path in run_dir.iterdir()}
    assert names >= FILES and any(name.startswith("events.out.tfevents") for name in names)
    assert files_outside(places, run_dir) == []
    events = len(list(run_dir.glob("events.*")))
    code, _, err = run(capsys, "fit", "--run", name, "--resume", "auto", "--trainer.max_steps", "3")
    assert code == 0, err
    assert len(list(run_dir.glob("events.*"))) == events + 1 and files_outside(places, run_dir) == []
    assert run(capsys, "report", "--run", name, "--csv", str(run_dir / "curve.csv"))[0] == 0


@pytest.mark.parametrize("name", ["$UNSET/x", "runs/${UNSET}"])
def test_a_name_that_cannot_be_replaced_is_refused_and_nothing_is_written(places, capsys, name):
    for flag in ("--run_dir", "--run"):
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", flag, name)
        what = "the environment variable UNSET is not set"
        assert code == 2 and f"error: run_dir is {name}, but {what}" in err and flag in err
    assert files_outside(places, places / "none") == []


def test_a_recipe_whose_name_has_a_variable(places, monkeypatch):
    assert expanded("runs/plain") == Path("runs/plain") and expanded(Path("/a/b")) == Path("/a/b")
    monkeypatch.setenv("LOOP", "x$LOOP")
    with pytest.raises(UserError, match="the environment variable LOOP is not set"):
        expanded("$LOOP")
    assert os.fspath(expanded("cost$")) == "cost$"
