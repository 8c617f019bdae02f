"""A run folder from before classes were renamed continues, with the numbers of the run that was never interrupted."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from recipe_runs import curve, run

OLD_RUN = Path(__file__).parents[1] / "fixtures/old_run"

# Learning rates are a function of the step. The other values depend on the processor: sums are rounded in another order, and
# Newton-Schulz in bf16 instead of fp32 moves losses by 2e-6 and gradient norms by 4e-5. A resume without the optimizer's
# moments moves the loss of step 6 by 6e-3.
TOLERANCE = {"train/loss": 2e-5, "val/loss": 2e-5, "grad/norm": 2e-4}


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD_RUN, "old_run")
    shutil.copy(OLD_RUN / "corpus.txt", "corpus.txt")
    return Path("old_run")


def assert_it_continued(folder: Path, out: str) -> None:
    assert "resume: from step 4" in out
    for tag, expected in json.loads((OLD_RUN / "expected.json").read_text()).items():
        logged = curve(folder, tag)
        assert list(logged) == [int(step) for step in expected], tag
        for step, value in expected.items():
            if tag == "lr":
                assert logged[int(step)] == pytest.approx(value, abs=1e-9)
            else:
                assert logged[int(step)] == pytest.approx(value, rel=TOLERANCE[tag]), (tag, step)


def test_a_run_folder_with_the_old_names_of_classes_resumes(old_run, capsys):
    assert "lit_llm.optimizers.MuonAdamW" in (old_run / "config.yaml").read_text()
    code, out, err = run(capsys, "fit", "--run", str(old_run), "--resume", "auto")
    assert code == 0, err
    assert_it_continued(old_run, out)
    written = (old_run / "config.yaml").read_text()
    assert "lit_llm.optim.MuonAdamW" in written and "class_path: callbacks." not in written


def test_a_recipe_of_the_user_with_the_old_names_of_classes_resumes_that_run(old_run, capsys):
    recipe = yaml.safe_load((old_run / "config.yaml").read_text())
    recipe["trainer"]["callbacks"] = [{"class_path": "callbacks.TimeBreakdown"}]
    Path("mine.yaml").write_text(yaml.safe_dump(recipe))
    (old_run / "config.yaml").unlink()
    flags = ["--schedule=callbacks.schedule.Cosine", "--plan", "lit_llm.plan_watch.PlanWatch"]
    code, out, err = run(capsys, "fit", "--config", "mine.yaml", "--run_dir", str(old_run), *flags, "--resume", "auto")
    assert code == 0, err
    assert_it_continued(old_run, out)
