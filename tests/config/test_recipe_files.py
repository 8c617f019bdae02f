"""Recipes as files: bases, shipped names, headers."""

from pathlib import Path

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.config.arguments import Flag, RecipeFile, read
from lit_llm.config.recipe_files import SHIPPED, Header, find_recipe, shipped
from lit_llm.config.resolve import resolved

BASE = """
model: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 32}
optimizer: {class_path: AdamW, init_args: {lr: 0.002, weight_decay: 0.3}}
"""
RECIPE = """# A title
#
# parameters   1,234  (of which 5 count)
# fits on      1 x thing  and what it needs
#    an indented line with  two gaps  is text
base: base/small.yaml
model: {n_layer: 3}
optimizer: {init_args: {lr: 0.005}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/small.yaml").write_text(BASE)
    Path("mine.yaml").write_text(RECIPE)
    return "mine.yaml"


def test_a_recipe_is_read_on_top_of_its_base(recipe):
    values = yaml.safe_load(resolved(["--config", recipe, "--model.n_head", "4"]))
    assert {key: values["model"][key] for key in ("n_layer", "n_head", "n_embd")} == {"n_layer": 3, "n_head": 4, "n_embd": 32}
    options = values["optimizer"]["init_args"]
    assert (options["lr"], options["weight_decay"]) == (0.005, 0.3)  # merged key by key, the recipe above its base
    assert "base" not in values


def test_the_base_of_a_later_file_comes_right_before_it(recipe):
    Path("first.yaml").write_text("model: {n_layer: 7, mlp: swiglu}")
    found = read(["--config", "first.yaml", f"--config={recipe}", "--model.n-embd", "64"])
    assert [item.path for item in found.items[:-1] if isinstance(item, RecipeFile)] == ["first.yaml", "base/small.yaml", recipe]
    assert found.items[-1] == Flag("model.n_embd", "64")
    assert found.config_files == ["first.yaml", recipe]  # the run is named after these


@pytest.mark.parametrize(
    "base, said",
    [
        ("none.yaml", "base recipe not found: none.yaml (base: none.yaml, in mine.yaml)"),
        ("second.yaml", "second.yaml is the base of mine.yaml, so it must not have a base itself"),
    ],
)
def test_a_wrong_base_is_reported_in_one_line(recipe, capsys, base, said):
    Path("second.yaml").write_text("base: base/small.yaml")
    Path(recipe).write_text(f"base: {base}")
    assert main(["plan", "--config", recipe]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_base_is_not_a_flag(recipe, capsys):
    assert main(["fit", "--config", recipe, "--base", "x.yaml"]) == 2
    assert "Give the base first" in capsys.readouterr().err


def test_a_mistake_in_a_base_names_the_base(recipe, capsys):
    Path("base/small.yaml").write_text("model: {n_lair: 2}")
    assert main(["plan", "--config", recipe]) == 2
    assert (
        "unknown key model.n_lair; did you mean model.n_layer? (--model.n_lair, in base/small.yaml)" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_folder_of_a_recipe_with_a_base_stands_alone(recipe, monkeypatch, capsys):
    monkeypatch.setenv("LIT_LLM_CACHE", "cache")
    small = ["--data.tokenizer", "Bytes", "--data.global_batch_size", "2", "--trainer.max_steps", "1"]
    assert main(["fit", "--config", recipe, *small, "--validation", "null", "--trainer.limit_val_batches", "1"]) == 0
    Path("base/small.yaml").unlink()
    saved = yaml.safe_load(Path("runs/mine/config.yaml").read_text())  # named after the recipe, not its base
    assert "base" not in saved and saved["model"]["n_embd"] == 32
    assert main(["validate", "--run", "runs/mine", "--trainer.limit_val_batches", "1"]) == 0


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml", "recipes/quickstart"])
def test_shipped_recipes_are_found_by_name_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == SHIPPED / "quickstart.yaml"
    assert read([f"--config={name}"]).config_files == [str(SHIPPED / "quickstart.yaml")]
    here = tmp_path / "recipes/quickstart.yaml"
    here.parent.mkdir()
    here.write_text("model: {n_layer: 1}")
    assert find_recipe(name) == Path("recipes/quickstart.yaml")  # one of this project comes first
    Path("quickstart.yaml").write_text("model: {n_layer: 2}")
    assert find_recipe("quickstart.yaml") == Path("quickstart.yaml")  # and a file of that path before it
    Path("quickstart").write_text("no recipe")
    assert find_recipe("quickstart") == Path("recipes/quickstart.yaml")


@pytest.mark.parametrize("name", ["nothing", "../pyproject", "/etc/passwd", ""])
def test_other_names_stay_what_they_are(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == Path(name)


def test_headers_are_titles_and_facts(recipe):
    assert Header.of(Path(recipe)) == Header("A title", {"parameters": "1,234", "fits on": "1 x thing"})
    Path("overlay.yaml").write_text("# Overlay: more of it.\nmodel: {n_layer: 9}\n# parameters   3\n")
    assert Header.of(Path("overlay.yaml")).is_overlay


def test_the_collection_is_in_order_of_size_with_overlays_last():
    headers = shipped()
    names = list(headers)
    assert names.index("quickstart") < names.index("gpt2-124m") < names.index("strategy/ddp")
    assert not any(name.startswith("base/") for name in names)


@pytest.mark.parametrize(
    "name, said",
    [
        ("quikstart", "did you mean quickstart?"),
        ("gpt2-medium", "did you mean gpt2-355m?"),
        ("gpt2-xl", "did you mean gpt2-1.5b?"),
        ("gpt-2", "did you mean gpt2-124m or gpt2-355m or gpt2-774m or gpt2-1.5b?"),
        ("llama-8b", "did you mean llama3.1-8b?"),
        ("llama-7b", "did you mean llama2-7b?"),
        ("qwen3-8b", "did you mean qwen3-0.6b or qwen3-4b or qwen3-30b-a3b?"),
        ("pp", "did you mean strategy/pp?"),
        ("zzz.yaml", "`python -m lit_llm recipes` lists the shipped ones"),
    ],
)
def test_an_unknown_recipe_is_the_only_mistake_reported(tmp_path, monkeypatch, capsys, name, said):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: config file {name} cannot be read: No such file or directory; {said} (--config)"
