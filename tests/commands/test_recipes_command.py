"""`python -m lit_llm recipes`: list, show, diff, copy."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.config.recipe_files import SHIPPED, shipped
from lit_llm.config.resolve import resolved


def test_the_list_needs_neither_torch_nor_lightning():
    script = (
        "import sys; from lit_llm.__main__ import main; main(['recipes']); print({'torch', 'lightning'} & set(sys.modules))"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == "set()"
    assert lines[0].split() == ["name", "parameters", "tokens", "fits", "on", "title"]


def test_the_list_has_every_recipe_with_figures_and_every_overlay(capsys):
    assert main(["recipes", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    main(["recipes"])
    printed, _, overlays = capsys.readouterr().out.partition("overlays: ")
    recipes = {path.stem for path in SHIPPED.glob("*.yaml") if "# parameters" in path.read_text()}
    assert {row["name"] for row in rows} == recipes == {line.split()[0] for line in printed.splitlines()[1:] if line}
    assert "?" not in printed and all(any(line.endswith(row["title"]) for line in printed.splitlines()) for row in rows)
    assert set(overlays.strip().split(", ")) == {name for name, header in shipped().items() if header.is_overlay}


def test_show_prints_what_runs_as_it_is(tmp_path, capsys):
    assert main(["recipes", "show", "quickstart", "--config", "strategy/ddp", "--model.n_layer", "3"]) == 0
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert values["model"]["n_layer"] == 3 and values["model"]["n_embd"] == 256
    assert values["trainer"]["strategy"] != "auto" and values["model"]["rope_theta"] == 10000.0
    (tmp_path / "shown.yaml").write_text(text)
    assert resolved(["--config", str(tmp_path / "shown.yaml")]) == text


def test_diff_prints_the_settings_that_differ_and_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: {n_layer: 4}\noptimizer: {class_path: AdamW, init_args: {lr: 0.001}}")
    Path("b.yaml").write_text("model: {n_layer: 5}\noptimizer: {class_path: AdamW, init_args: {lr: 0.001}}\nrun_dir: x")
    assert main(["recipes", "diff", "a.yaml", "b.yaml"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["a.yaml", "b.yaml"]
    assert sorted(rows[1:]) == [["model.n_layer", "4", "5"], ["run_dir", "null", "x"]]
    main(["recipes", "diff", "a.yaml", "a.yaml"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_diff_compares_a_copy_with_the_shipped_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "llama2-7b", "."]) == 0
    copy = Path("recipes/llama2-7b.yaml")
    copy.write_text(copy.read_text().replace("n_layer: 32", "n_layer: 31"))
    for pair in (["llama2-7b", str(copy)], [str(copy), "llama2-7b"]):
        capsys.readouterr()
        assert main(["recipes", "diff", *pair]) == 0
        (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "n_layer" in line]
        assert row == ["model.n_layer", *(["31", "32"] if pair[0] == str(copy) else ["32", "31"])]


def fit(project, *arguments):
    small = ["--model.n_layer", "1", "--model.n_embd", "32", "--model.n_head", "2", "--model.block_size", "32"]
    small += ["--data.tokenizer", "Bytes", "--data.global_batch_size", "2", "--data.micro_batch_size", "2"]
    small += ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--samples", "null"]
    command = [sys.executable, "-m", "lit_llm", "fit", "--config", "recipes/quickstart.yaml", *arguments, *small]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


@pytest.mark.slow
def test_a_copied_recipe_runs_in_its_new_home_beside_the_copied_callbacks(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    project = tmp_path / "project"
    assert main(["recipes", "copy", "quickstart", str(project), "--callbacks", "callbacks"]) == 0
    assert (project / "recipes/strategy/fsdp2.yaml").read_text() == (SHIPPED / "strategy/fsdp2.yaml").read_text()
    schedule = project / "callbacks/learning_rate_schedules.py"
    schedule.write_text(schedule.read_text() + "\nprint('the schedule of this project')\n")
    recipe = project / "recipes/quickstart.yaml"
    recipe.write_text(recipe.read_text().replace("warmup_steps: 20", "warmup_steps: 1"))
    done = fit(project, "--config", "recipes/precision/bf16-mixed.yaml")
    assert done.returncode == 0, done.stderr
    assert "the schedule of this project" not in done.stdout  # recipes name those of lit_llm
    saved = yaml.safe_load((project / "runs/quickstart/config.yaml").read_text())
    assert saved["trainer"]["precision"] == "bf16-mixed" and saved["schedule"]["init_args"]["warmup_steps"] == 1
    # The copy is for code of one's own, as a package of that name.
    own = "import sys, callbacks; callbacks.WSD(1); assert 'lit_llm' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", own], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0 and "the schedule of this project" in done.stdout, done.stderr


def test_a_copy_that_was_changed_is_what_its_name_means_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "llama2-7b", "."]) == 0
    copy = Path("recipes/llama2-7b.yaml")
    copy.write_text(copy.read_text().replace("n_layer: 32", "n_layer: 31"))
    capsys.readouterr()
    for name in ("llama2-7b", "recipes/llama2-7b", "recipes/llama2-7b.yaml"):
        assert main(["recipes", "show", name]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]["n_layer"] == 31


def test_a_recipe_for_weights_that_are_not_here_is_shown_without_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "show", "finetune", "--model.dropout", "0.1"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["init_from"] == "runs/base" and values["model"] == {"dropout": 0.1}
    assert main(["fit", "--config", "finetune", "--data.paths", "x.txt"]) == 2
    assert capsys.readouterr().err == "error: there is no run folder or checkpoint runs/base (--init_from)\n"


def test_a_recipe_is_copied_with_its_base_and_not_with_those_of_others(tmp_path):
    assert main(["recipes", "copy", "gpt2-124m", str(tmp_path)]) == 0
    copied = {path.name for path in (tmp_path / "recipes").glob("*.yaml")}
    assert "gpt2-124m.yaml" in copied and "quickstart.yaml" not in copied and not (tmp_path / "callbacks").exists()
    assert resolved(["--config", str(tmp_path / "recipes/gpt2-124m.yaml")]) == resolved(["--config", "gpt2-124m"])


def test_a_users_own_recipe_is_not_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("model: {n_layer: 1}")
    for name in ("mine", "recipes/mine.yaml"):
        assert main(["recipes", "copy", name, "elsewhere"]) == 2
        assert "recipes/mine.yaml is not a shipped recipe: only those can be copied" in capsys.readouterr().err
    assert not Path("elsewhere").exists()


def test_what_was_changed_is_not_overwritten_unless_asked(tmp_path, capsys):
    main(["recipes", "copy", "quickstart", str(tmp_path)])
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 0  # the same again
    recipe = tmp_path / "recipes/quickstart.yaml"
    recipe.write_text("mine")
    (tmp_path / "recipes/decay.yaml").unlink()
    capsys.readouterr()
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 2
    said = f"{recipe} exists already, so nothing was copied: give another folder (DIR), or replace with --replace true"
    assert said in capsys.readouterr().err
    assert recipe.read_text() == "mine" and not (tmp_path / "recipes/decay.yaml").exists()
    assert main(["recipes", "copy", "quickstart", str(tmp_path), "--replace"]) == 0
    assert recipe.read_text() == (SHIPPED / "quickstart.yaml").read_text()
    assert (tmp_path / "recipes/quickstart.yaml.1").read_text() == "mine"
    assert f"Renamed {recipe} to quickstart.yaml.1.\n" in capsys.readouterr().out


def test_callbacks_are_not_mixed_with_files_of_the_project(tmp_path, capsys):
    copy = ["recipes", "copy", "quickstart", str(tmp_path), "--callbacks"]
    own = tmp_path / "callbacks/__init__.py"  # one of our names
    own.parent.mkdir()
    own.write_text("mine")
    for words in ([*copy, "callbacks"], [*copy, "callbacks", "--replace", "true"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert str(own) in said and said.endswith("(--callbacks NAME)\n") and "--replace" not in said
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own] and own.read_text() == "mine"
    for _ in range(2):  # the same again
        assert main([*copy, "of_lit_llm"]) == 0
    ours = SHIPPED.parent / "callbacks"
    assert {path.name for path in (tmp_path / "of_lit_llm").iterdir()} == {path.name for path in ours.glob("*.py")}
    (tmp_path / "of_lit_llm/own.py").write_text("")
    assert main([*copy, "of_lit_llm"]) == 2 and "of_lit_llm/own.py is not a copy" in capsys.readouterr().err
    assert main(copy) == 2 and "--callbacks" in capsys.readouterr().err


def test_only_the_named_callbacks_are_copied_and_what_they_import(tmp_path, monkeypatch):
    for _ in range(2):  # the same again
        assert main(["recipes", "copy", "quickstart", str(tmp_path), "--callbacks", "few", "--only", "WSD,GradientNorm"]) == 0
    names = {path.name for path in (tmp_path / "few").iterdir()}
    assert {"learning_rate_schedules.py", "gradient_norm_and_clipping.py", "_torch.py"} <= names
    assert not {"health.py", "checkpoint.py", "ema.py"} & names
    monkeypatch.syspath_prepend(str(tmp_path))
    few = importlib.import_module("few")
    assert few.WSD(3).warmup_steps == 3 and few.GradientNorm(0.5).clip == 0.5 and few.__all__ == ["WSD", "GradientNorm"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["copy", "quickstart", "x", "--callbacks", "y", "--only", "WDS"], "there is no callback WDS: known are BatchRamp"),
        (["copy", "quickstart", "x", "--only", "WSD"], "(--callbacks NAME)"),
        (["show", "quikstart"], "recipe not found: quikstart; did you mean quickstart"),
        (["copy", "strategy/ddp", "x"], "strategy/ddp is an overlay: copy a recipe instead, which includes all overlays"),
        (
            ["copy", "quickstart", "/dev/null/x"],
            "error: /dev/null/x/recipes/quickstart.yaml cannot be written: Not a directory (DIR)",
        ),
        (["copy", "quickstart", "x", "--callback"], "unknown flag --callback; did you mean --callbacks?"),
        (["copy", "zzzzzzzz", "x"], "recipe not found: zzzzzzzz (python -m lit_llm recipes lists them)"),
        (["diff", "quickstart", "quickstart", "--json"], "unknown flag --json"),
        (["show", "quickstart", "--model.n_lair", "2"], "unknown key model.n_lair; did you mean model.n_layer?"),
    ],
)
def test_constructor_errors_are_reported_in_one_line(capsys, arguments, said):
    assert main(["recipes", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_page_shows_the_first_lines_of_the_list_as_they_are_printed(capsys):
    main(["recipes"])
    printed = capsys.readouterr().out.splitlines()
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    shown = [line.removeprefix("    ") for line in page.splitlines() if re.match(r" {4}[\w.-]+ +(parameters|[\d,]{7,}) ", line)]
    assert len(shown) > 3  # the page cuts titles: "Bytes: …"
    assert all(line.startswith(cut.removesuffix("…")) for cut, line in zip(shown, printed, strict=False))
