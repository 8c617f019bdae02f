"""Runs whose rates follow from the width: continued, and not continued with other groups of the optimizer."""

import re

import pytest
import torch
from recipe_runs import run

from lit_llm.checkpoint.disk_format import read

BASE = ("--model.base_width", "8", "--model.base_depth", "1", "--model.n_layer", "2")


def weights(run_dir):
    return read(f"{run_dir}/checkpoints/last.ckpt")["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["MuonAdamW", "AdamW"])
def test_a_continued_run_is_the_whole_run_and_other_groups_are_refused(folder, capsys, optimizer):
    flags = [*BASE, "--optimizer", optimizer, "--optimizer.lr", "0.01"]
    fit = ["fit", "--config", "tiny.yaml", "--schedule.total_steps", "8"]
    assert run(capsys, *fit, *flags, "--run_dir", "runs/whole")[0] == 0
    assert run(capsys, *fit, *flags, "--run_dir", "runs/parts", "--trainer.max_steps", "4")[0] == 0
    auto = [*fit, *flags, "--run_dir", "runs/parts", "--resume", "auto"]
    without = ("--model.base_width", "null", "--model.base_depth", "null", "--accept_changes", "true")
    code, _, err = run(capsys, *auto, *without)
    assert code == 2 and re.search(r"its state does not fit \(--model.base_width 8 --model.base_depth 1\)", err)
    assert run(capsys, *auto)[0] == 0
    whole, parts = weights("runs/whole"), weights("runs/parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    # Another run takes these weights, not the rates.
    tuned = [*fit, "--model.n_layer", "2", "--init_from", "runs/whole", "--run_dir", "runs/tuned"]
    assert run(capsys, *tuned)[0] == 0
    settings = read("runs/tuned/checkpoints/last.ckpt")["model_config"]
    assert settings["n_layer"] == 2 and settings["base_width"] is None
