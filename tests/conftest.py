"""What a command sets for its whole process is undone after each test, so that the order of tests does not matter."""

import logging
import os

import lightning.pytorch  # noqa: F401  # sets the levels that are kept here
import pytest
from recipe_runs import RECIPE, TEXT

LEVELS = {name: logging.getLogger(name).level for name in ("lightning.fabric", "lightning.pytorch")}


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    yield
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # of seed_everything: processes started later would seed with it
        os.environ.pop(name, None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path
