"""The callbacks of a run are put together before training: `fit` adds none, and a run that is thrown away has fewer."""

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from recipe_runs import run

from lit_llm.config.build import build
from lit_llm.config.resolve import read_recipe

STOP = '[{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}]'


def names(trainer: Trainer) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.parametrize("flags", [[], ["--validation", "null"], ["--hang_timeout", "null"]], ids=str)
def test_a_launch_is_watched_and_can_be_refused_and_fit_adds_nothing(folder, capsys, monkeypatch, flags):
    words = ["--config", "tiny.yaml", "--trainer.max_steps", "3", "--trainer.callbacks+", STOP, *flags]
    built = names(build(read_recipe("fit", words)).trainer)
    assert built[:2] == ["ProgressWatch", "StayEnded"]  # before whatever may fail, or wait
    for watching in ("EarlyStopping", "StepCheckpoint"):
        assert "RequireMonitor" in built[: built.index(watching)]
    assert built[built.index("EarlyStopping") - 1] == "RequireMonitor" and built.count("RequireMonitor") == 2
    assert ("ValidateLast" in built) == ("--validation" in flags) and built.count("FolderGuard") == 1
    trained, fit = [], Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self, *args, **kwargs: (trained.append(names(self)), fit(self, *args, **kwargs)))
    assert run(capsys, "fit", *words)[0] == 0
    assert trained == [built]


def test_a_run_that_is_thrown_away_is_neither_watched_nor_locked(folder):
    built = build(read_recipe("fit", ["--config", "tiny.yaml"]), run_dir=Path("scratch"))
    watching = {"ProgressWatch", "StayEnded", "RequireMonitor", "ValidateLast", "FolderGuard"}
    assert not watching & set(names(built.trainer)) and "SaveRunFolder" in names(built.trainer)
    assert not Path("scratch").exists()
