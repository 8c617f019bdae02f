"""The first steps of the recipes whose curves are shipped: on the curves' own text, and on a text that every machine has."""

import hashlib
import random
from pathlib import Path

import pytest
import yaml
from recipe_runs import curve

from lit_llm.__main__ import main
from lit_llm.config.recipe_files import SHIPPED
from lit_llm.data import PythonStdlib
from lit_llm.runs.curve import Curve

CURVES = sorted((SHIPPED / "evidence").glob("*.csv"), key=lambda path: path.stem)


def tiered(slow: str) -> list:
    return [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem == slow else pytest.mark.soak) for p in CURVES]


TEXT_OF_THE_CURVES = "68332a719eed82a879fd09c4ecbd8749afffb08046fb7b01301a7c98c682d184"
"""`text_hash` of the standard library that the curves were made on: that of Python 3.11.7."""


def test_the_recipes_that_two_cores_finish_have_one():
    assert [path.stem for path in CURVES] == ["bytes", "chars", "moe", "quickstart"]


def text_hash() -> str:
    """SHA-256 of the running Python's standard library, as PythonStdlib reads it: split, path and contents of each file."""
    data, digest = PythonStdlib(), hashlib.sha256()
    for one in data.inputs():
        path = Path(one.source.path)
        digest.update(f"{one.split} {path.relative_to(data.root).as_posix()} {one.size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def ten_steps(path: Path) -> list[str]:
    """The recipe of a curve in fp32: the first ten steps of its schedule, and one batch of its validation."""
    whole = yaml.safe_load((SHIPPED / f"{path.stem}.yaml").read_text())["trainer"]["max_steps"]
    steps = ["--trainer.max_steps", "10", "--schedule.total_steps", str(whole), "--trainer.precision", "32-true"]
    return ["fit", "--config", path.stem, *steps, "--trainer.limit_val_batches", "1", "--samples", "null"]


@pytest.mark.parametrize("path", tiered("quickstart"))
def test_ten_steps_follow_the_shipped_curve(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Other threads and processors sum in another order: 0.1 % is far more than that. Python versions differ in a part of
    # their text, so that other batches are compared: their losses are alike, tokens and rates are equal.
    tolerance = "0.001" if text_hash() == TEXT_OF_THE_CURVES else "0.15"
    again = [*ten_steps(path), "--check-against", "auto", "--check_tolerance", tolerance]
    assert main(again) == 0
    assert "2 rows of" in capsys.readouterr().out
    if path.stem == "chars":  # once: another recipe leaves the curve
        with pytest.warns(UserWarning, match="leaves .* at step 10: loss"):
            assert main([*again, "--optimizer.weight_decay", "20", "--run_dir", "other"]) == 1


FIXED_TEXT = "\n".join(
    " ".join(chooser.choice(("def", "class", "return", "x", "y = 1", "(a, b)", "if", "not", "# why")) for _ in range(9))
    for chooser in [random.Random(0)]
    for _ in range(6000)
)
LOSSES = {
    "bytes": {1: 5.399619, 10: 0.582856},
    "chars": {1: 3.405690, 10: 2.596214},
    "moe": {1: 5.577940, 10: 1.872567},
    "quickstart": {1: 5.644029, 10: 1.413040},
}
"""Training loss by step on FIXED_TEXT: torch 2.13, one thread, x86-64 with AVX2."""


@pytest.mark.parametrize("path", tiered("chars"))
def test_ten_steps_on_a_fixed_text_are_what_they_were(path, tmp_path, monkeypatch):
    """On any version of Python."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(FIXED_TEXT)
    batch = yaml.safe_load((SHIPPED / f"{path.stem}.yaml").read_text())["data"]["init_args"]
    data = {"class_path": "TextFiles", "init_args": {**batch, "paths": "text.txt"}}
    Path("fixed.yaml").write_text(yaml.safe_dump({"data": data}))
    assert main([*ten_steps(path), "--config", "fixed.yaml"]) == 0
    assert curve(Path("runs") / path.stem, "train/loss") == pytest.approx(LOSSES[path.stem], rel=1e-3)


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
def test_a_curve_is_that_of_its_header(path):
    curve = Curve.read(path)
    text = (SHIPPED / f"{path.stem}.yaml").read_text()
    recipe = yaml.safe_load(text)
    last = curve.rows[-1]
    assert last.step == recipe["trainer"]["max_steps"]
    tokens = last.step * recipe["data"]["init_args"]["global_batch_size"] * recipe["model"]["block_size"]
    assert last.tokens == tokens
    assert f"validation loss {last.validation_loss:.3f}" in text
    assert {"hardware", "versions", "seed", "command"} <= curve.facts.keys()
