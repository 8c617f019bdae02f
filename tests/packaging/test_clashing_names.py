"""The wheel beside torchtune, in a project whose own modules have the names of lit_llm's folders."""

import zipfile
from pathlib import Path

import pytest
import yaml
from environments import make_environment, run
from recipe_runs import RECIPE, TEXT

MY_RECIPE = yaml.safe_load(RECIPE)
MY_RECIPE["trainer"]["callbacks"] = [{"class_path": "callbacks.CountSteps"}]

MY_CALLBACKS = """
from lightning.pytorch import Callback

class CountSteps(Callback):
    def on_train_end(self, trainer, pl_module):
        print("my callback saw", trainer.global_step, "steps")
"""


def torchtune_wheel(folder: Path) -> Path:
    """A stand-in for torchtune, whose top-level `recipes` cannot be imported either."""
    stand_in = folder / "torchtune-0.6.1-py3-none-any.whl"
    with zipfile.ZipFile(stand_in, "w") as archive:
        archive.writestr("recipes/__init__.py", "raise ModuleNotFoundError('recipes is not a package')\n")
        archive.writestr("torchtune/__init__.py", "")
    return stand_in


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> tuple[Path, Path]:
    """Python and site-packages of an environment with both wheels."""
    folder = tmp_path_factory.mktemp("beside-torchtune")
    python, site = make_environment(folder / "venv")
    installed: set[str] = set()
    for each in (torchtune_wheel(folder), wheel):
        with zipfile.ZipFile(each) as archive:
            files = {name for name in archive.namelist() if not name.endswith("/")}
            assert not files & installed, "one wheel overwrites files of the other"
            installed |= files
            archive.extractall(site)
    assert "recipes/__init__.py" in installed
    return python, site


@pytest.fixture
def project(tmp_path) -> Path:
    """A project with its own callbacks. Its other modules must not be imported."""
    files = {
        "callbacks.py": MY_CALLBACKS,
        "mine.yaml": yaml.safe_dump(MY_RECIPE),
        "text.txt": TEXT,
    }
    names = ("recipes", "data", "models", "optim", "plan", "training", "checkpoint", "config", "commands")
    files |= {f"{name}/__init__.py": f"raise ImportError('{name} of the project was imported')\n" for name in names}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_short_names_of_callbacks_are_those_of_lit_llm(environment, project):
    shown = run(environment[0], "-m", "lit_llm", "recipes", "show", "mine.yaml", cwd=project)
    assert "class_path: lit_llm.callbacks.Cosine" in shown and "class_path: callbacks.CountSteps" in shown
