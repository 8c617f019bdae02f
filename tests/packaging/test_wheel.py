"""The wheel alone, in a virtual environment and a folder of its own: list, copy, train, export, load in transformers."""

import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import ROOT, make_environment, run

SMALL = [
    *("--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "32", "--model.block_size", "32"),
    *("--data", "TextFiles", "--data.paths", "my.txt", "--data.tokenizer", "Bytes"),
    *("--data.micro_batch_size", "4", "--data.global_batch_size", "8"),
    *("--trainer.max_steps", "10", "--schedule.warmup_steps", "2", "--trainer.limit_val_batches", "2", "--samples", "null"),
    *("--model.input_convolution", "null", "--model.exclusive_attention", "false"),  # transformers has neither
]
COMPARE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import lit_llm.checkpoint.load_weights
theirs = AutoModelForCausalLM.from_pretrained("hf").eval()
ours = lit_llm.checkpoint.load_weights.load_model(Path("runs/quickstart/checkpoints/last.ckpt"))
ids = torch.tensor([AutoTokenizer.from_pretrained("hf")("def f(x):")["input_ids"]])
assert ids[0].tolist() == list(b"def f(x):"), ids
with torch.no_grad():
    a, b = theirs(ids).logits, ours(ids)
assert a.shape == b.shape and a.std() > 0.01, (a.shape, b.shape, a.std())
print(lit_llm.__file__, float((a - b).abs().max()))
"""


def source_files() -> set[str]:
    """What belongs into the wheel: code, recipes, evidence, tables."""
    kinds = {".py", ".yaml", ".csv", ".typed"}
    places = {"lit_llm": "lit_llm", "callbacks": "lit_llm/callbacks", "recipes": "lit_llm/recipes"}
    return {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in places.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    }


def packaged_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_it_holds_every_package_recipe_and_table_and_nothing_else(wheel):
    assert packaged_files(wheel) == source_files()


def test_it_carries_the_license_and_the_console_script(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (license,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        (scripts,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert archive.read(license) == (ROOT / "LICENSE").read_bytes()
        assert "lit_llm = lit_llm.__main__:console_script" in archive.read(scripts).decode()


def test_a_wheel_built_from_the_source_archive_holds_the_same(source, build, tmp_path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert packaged_files(build("wheel", unpacked, tmp_path)) == source_files()


def use(python: Path, folder: Path) -> str:
    """What a newcomer does, from an empty folder; returns what the comparison with transformers prints."""
    listed = run(python, "-m", "lit_llm", "recipes", cwd=folder)
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert recipe.stem in listed, recipe
    run(python, "-m", "lit_llm", "recipes", "copy", "quickstart", "proj", "--callbacks", "callbacks", cwd=folder)
    project = folder / "proj"
    (project / "my.txt").write_text("".join(f"def f(x): return x + {i % 7}\n" for i in range(400)))
    trained = run(python, "-m", "lit_llm", "fit", "--config", "recipes/quickstart.yaml", *SMALL, cwd=project)
    assert "step 10/10" in trained and "val/loss" in trained
    run(python, "-m", "lit_llm", "export", "--run", "runs/quickstart", "--out", "hf", cwd=project)
    return run(python, "-c", COMPARE, cwd=project)


@pytest.mark.slow
def test_with_the_wheel_alone_a_recipe_is_copied_trained_exported_and_loaded(wheel, tmp_path):
    python, site = make_environment(tmp_path / "venv")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "empty").mkdir()
    imported, difference = use(python, tmp_path / "empty").split()
    assert Path(imported).is_relative_to(site)
    assert float(difference) < 1e-4
