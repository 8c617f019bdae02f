"""A run is decided once, and checks change nothing: neither the recipe, nor the run, nor its objects."""

import copy
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from recipe_runs import RECIPE, TEXT

from lit_llm.config import checks
from lit_llm.config.build import build
from lit_llm.config.objects import make_objects
from lit_llm.config.parse import parse
from lit_llm.config.resolve import resolve

WRONG = ["--model.n_head", "5", "--data.block_size", "4096", "--lora.rank", "2", "--batch_ramp", "BatchRamp"]
WRONG += ["--batch_ramp.tokens_per_batch", "[[0, 7]]", "--trainer.max_steps", "-1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    Path("tiny.yaml").write_text(RECIPE)
    return tmp_path


def plain(value: object) -> object:
    """The settings of an object, which a comparison can tell apart. What data modules keep of their files is private."""
    kinds = (int, float, str, bool, type(None), tuple, list, Path)
    return {name: copy.deepcopy(each) for name, each in vars(value).items() if name[0] != "_" and isinstance(each, kinds)}


def test_checks_say_the_same_twice_and_change_nothing(folder):
    run = resolve(parse("fit", ["--config", "tiny.yaml", *WRONG]))
    made = make_objects(run, {})
    every = [checks.model_problems, checks.training_problems, checks.data_problems, checks.initial_problems]
    every += [checks.evaluation_problems, checks.base_of_adapters, checks.batch_notes]

    def state() -> list[object]:
        return [run.config.as_dict(), plain(run), plain(made), {**made.parts}, *map(plain, made.parts.values())]

    before = state()
    first = [check(run, made) for check in every]
    assert sum(map(len, first[:4])) >= 4  # several of these settings are wrong
    for order in (every, every[::-1]):
        again = {check: check(run, made) for check in order}
        assert [again[check] for check in every] == first
    assert state() == before


def test_building_decides_in_a_copy_of_the_recipe(folder):
    recipe = parse(
        "fit", ["--config", "tiny.yaml", "--trainer.precision", "auto", "--resume", "auto", "--seed_everything", "true"]
    )
    before = recipe.config.as_dict()
    built = build(recipe)
    assert recipe.config.as_dict() == before and (recipe.problems, recipe.notes) == ([], [])
    decided = built.config
    assert decided.run_dir == str(built.run.run_dir) != before["run_dir"]
    assert (before["trainer"]["precision"], before["seed_everything"]) == ("auto", True)
    assert decided.trainer.precision in ("32-true", "bf16-mixed") and type(decided.seed_everything) is int
    for described in (built, built.run, built.objects):
        with pytest.raises(FrozenInstanceError):
            setattr(described, fields(described)[0].name, None)
