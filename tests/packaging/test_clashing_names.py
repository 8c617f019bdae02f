"""The wheel beside torchtune, in a project whose own modules have the names of lit_llm's folders: every command works."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from environments import make_environment, run
from recipe_runs import RECIPE, TEXT

from lit_llm.__main__ import COMMANDS

TORCHTUNE = "torchtune==0.6.1"
TINY = ["--config", "mine.yaml"]
RUN = ["--run", "runs/mine"]
ARGUMENTS = {
    "recipes": ["show", "mine.yaml"],
    "fit": TINY,
    "plan": [*TINY, "--hardware", "h100-sxm"],
    "check": TINY,
    "find-lr": [*TINY, "--out", "rate.yaml", "--seeds", "1", "--probe_steps", "5", "--sweep_steps", "20"],
    "find-batch": [*TINY, "--out", "batch.yaml", "--seeds", "1", "--noise_steps", "4"],
    "validate": RUN,
    "test": [*RUN, "--data.test", "held-out.txt"],
    "generate": [*RUN, "--max_new_tokens", "3"],
    "chat": [*RUN, "--max_new_tokens", "3"],
    "curve": [*RUN, "--out", "mine.csv"],
    "report": [*RUN, "--out", "report.html"],
    "doctor": [*RUN],
    "clean": ["--data.paths", "text.txt", "--out", "cleaned"],
    "prepare": ["--data", "TextFiles", "--data.paths", "text.txt", "--out", "shards"],
    "consolidate": [*RUN, "--out", "whole.ckpt"],
    "export": [*RUN, "--out", "hf"],
    "import": ["--from", "hf", "--out", "runs/imported"],
    "certify": ["--only", "attention/blocks/causal"],
}
"""Command → arguments, in the order in which they run."""

MY_RECIPE = yaml.safe_load(RECIPE)
MY_RECIPE["trainer"]["callbacks"] = [{"class_path": "callbacks.CountSteps"}]

MY_CALLBACKS = """
from lightning.pytorch import Callback

class CountSteps(Callback):
    def on_train_end(self, trainer, pl_module):
        print("my callback saw", trainer.global_step, "steps")
"""


def torchtune_wheel(folder: Path) -> tuple[Path, str]:
    """torchtune from the package index. Without a connection: a wheel whose top-level `recipes` cannot be imported either."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), TORCHTUNE]
    try:
        subprocess.run(pip, check=True, capture_output=True, timeout=60)
        (found,) = folder.glob("torchtune-*.whl")
        return found, f"{TORCHTUNE} from the package index"
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        stand_in = folder / "torchtune-0.6.1-py3-none-any.whl"
        with zipfile.ZipFile(stand_in, "w") as archive:
            archive.writestr("recipes/__init__.py", "raise ModuleNotFoundError('recipes is not a package')\n")
            archive.writestr("torchtune/__init__.py", "")
        return stand_in, "a stand-in for torchtune (the package index cannot be reached)"


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> tuple[Path, Path]:
    """Python and site-packages of an environment with both wheels."""
    folder = tmp_path_factory.mktemp("beside-torchtune")
    python, site = make_environment(folder / "venv")
    torchtune, which = torchtune_wheel(folder)
    print(f"tested with {which}")
    installed: set[str] = set()
    for each in (torchtune, wheel):
        with zipfile.ZipFile(each) as archive:
            files = {name for name in archive.namelist() if not name.endswith("/")}
            assert not files & installed, "one wheel overwrites files of the other"
            installed |= files
            archive.extractall(site)
    assert "recipes/__init__.py" in installed
    return python, site


@pytest.fixture
def project(request, tmp_path) -> Path:
    """A project with its own callbacks (a file or a folder). Its other modules must not be imported."""
    files = {
        request.param: MY_CALLBACKS,
        "mine.yaml": yaml.safe_dump(MY_RECIPE),
        "text.txt": TEXT,
        "held-out.txt": TEXT.upper(),
    }
    names = ("recipes", "data", "models", "optim", "plan", "training", "checkpoint", "config", "commands")
    files |= {f"{name}/__init__.py": f"raise ImportError('{name} of the project was imported')\n" for name in names}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("project", ["callbacks/__init__.py"], indirect=True)
@pytest.mark.soak
def test_every_command_runs_and_uses_the_modules_of_lit_llm(environment, project):
    python, site = environment
    assert set(ARGUMENTS) == set(COMMANDS)
    printed = {}
    for name, arguments in ARGUMENTS.items():
        codes = (0, 1) if name == "check" else (0,)  # check exits 1 where a line fails: this text repeats, and speed varies
        printed[name] = run(python, "-m", "lit_llm", name, *arguments, cwd=project, codes=codes)
    assert "my callback saw 8 steps" in printed["fit"]
    assert "step 8/8" in printed["fit"] and "val/loss" in printed["fit"]
    assert "first loss is ln V" in printed["check"]
    assert (project / "hf/config.json").is_file() and (project / "runs/imported/config.yaml").is_file()
    modules = ("callbacks", "recipes", "data", "tokenizers", "models.gpt")
    code = f"import importlib\nfor name in {modules}: print(importlib.import_module('lit_llm.' + name).__file__)"
    imported = run(python, "-c", code, cwd=project).split()
    assert len(imported) == len(modules) and all(Path(file).is_relative_to(site / "lit_llm") for file in imported)


@pytest.mark.parametrize(
    "project", ["callbacks.py", pytest.param("callbacks/__init__.py", marks=pytest.mark.soak)], indirect=True
)
@pytest.mark.slow
def test_short_names_of_callbacks_are_those_of_lit_llm(environment, project):
    shown = run(environment[0], "-m", "lit_llm", "recipes", "show", "mine.yaml", cwd=project)
    assert "class_path: lit_llm.callbacks.Cosine" in shown and "class_path: callbacks.CountSteps" in shown
