"""The wheel alone, in a virtual environment and a folder of its own: list, copy, train, export, load in transformers."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("lit_llm", "callbacks", "recipes")
SMALL = [
    *("--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "32", "--model.block_size", "32"),
    *(
        "--data",
        "TextFiles",
        "--data.paths",
        "my.txt",
        "--data.tokenizer",
        "Bytes",
        "--data.micro_batch_size",
        "4",
        "--data.global_batch_size",
        "8",
    ),
    *("--trainer.max_steps", "10", "--schedule.warmup_steps", "2", "--trainer.limit_val_batches", "2", "--samples", "null"),
]
COMPARE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import lit_llm.checkpoint.load_model
theirs = AutoModelForCausalLM.from_pretrained("hf").eval()
ours = lit_llm.checkpoint.load_model.load_model(Path("runs/quickstart/checkpoints/last.ckpt"))
ids = torch.tensor([AutoTokenizer.from_pretrained("hf")("def f(x):")["input_ids"]])
assert ids[0].tolist() == list(b"def f(x):"), ids
with torch.no_grad():
    a, b = theirs(ids).logits, ours(ids)
assert a.shape == b.shape and a.std() > 0.01, (a.shape, b.shape, a.std())
print(lit_llm.__file__, float((a - b).abs().max()))
"""


def source_files() -> set[str]:
    """What belongs into the wheel: code, recipes, evidence, tables."""
    kinds = {".py", ".yaml", ".csv"}
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in kinds
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What is built from: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """Built by the backend that pyproject.toml names, the way pip calls it."""
    folder = tmp_path_factory.mktemp("wheel")
    script = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_every_package_recipe_and_table_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == source_files()


def make_environment(folder: Path) -> tuple[Path, Path]:
    """An empty virtual environment that finds torch and the like where this process does; its python and site-packages."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    told = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True
    )
    site = Path(told.stdout.strip())
    # A path in a .pth file is not searched for .pth files: an editable install of lit_llm there does not count.
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python, site


def use(python: Path, folder: Path) -> str:
    """What a newcomer does, from an empty folder; returns what the comparison with transformers prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"LIT_LLM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str, cwd: Path = folder) -> str:
        done = subprocess.run([str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    listed = run("-m", "lit_llm", "recipes")
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert recipe.stem in listed, recipe
    run("-m", "lit_llm", "recipes", "copy", "quickstart", "proj", "--callbacks")
    project = folder / "proj"
    (project / "my.txt").write_text("".join(f"def f(x): return x + {i % 7}\n" for i in range(400)))
    trained = run("-m", "lit_llm", "fit", "--config", "recipes/quickstart.yaml", *SMALL, cwd=project)
    assert "step 10/10" in trained and "val/loss" in trained
    run("-m", "lit_llm", "export", "--run", "runs/quickstart", "--out", "hf", cwd=project)
    return run("-c", COMPARE, cwd=project)


@pytest.mark.slow
def test_with_the_wheel_alone_a_recipe_is_copied_trained_exported_and_loaded(wheel, tmp_path):
    python, site = make_environment(tmp_path / "venv")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "empty").mkdir()
    imported, difference = use(python, tmp_path / "empty").split()
    assert Path(imported).is_relative_to(site)
    assert float(difference) < 1e-4


@pytest.mark.soak
def test_pip_builds_and_installs_it(source, tmp_path):
    python, site = make_environment(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source], check=True)
    (built,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", *offline, built], check=True)
    (tmp_path / "empty").mkdir()
    imported, difference = use(python, tmp_path / "empty").split()
    assert Path(imported).is_relative_to(site)
    assert float(difference) < 1e-4
