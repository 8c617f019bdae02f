"""The first steps of the recipes whose curves are shipped follow these curves, as any run of them should."""

import platform

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.cli.recipe_files import SHIPPED
from lit_llm.runs.curve import Curve

CURVES = sorted((SHIPPED / "evidence").glob("*.csv"), key=lambda path: path.stem)


def test_the_recipes_that_two_cores_finish_have_one():
    assert [path.stem for path in CURVES] == ["bytes", "chars", "quickstart"]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.soak) if p.stem == "bytes" else p for p in CURVES], ids=lambda path: path.stem
)
def test_ten_steps_follow_the_shipped_curve(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    python = f"python {platform.python_version()}"
    if python not in Curve.read(path).facts["versions"]:
        pytest.skip(f"the standard library of {python} is other text than the curve's")
    recipe = yaml.safe_load((SHIPPED / f"{path.stem}.yaml").read_text())
    steps = ["--trainer.max_steps", "10", "--schedule.total_steps", str(recipe["trainer"]["max_steps"])]
    quick = ["--trainer.limit_val_batches", "1", "--samples", "null"]
    # Other threads sum in another order: nothing like two percent, which other machines may need.
    again = ["fit", "--config", path.stem, *steps, *quick, "--check-against", "auto", "--check_tolerance", "0.001"]
    assert main(again) == 0
    assert "2 rows of" in capsys.readouterr().out
    if path.stem == "chars":  # what is not the recipe does not; once, the others take longer
        with pytest.warns(UserWarning, match="leaves .* at step 10: loss"):
            assert main([*again, "--optimizer.weight_decay", "20", "--run_dir", "other"]) == 1


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
