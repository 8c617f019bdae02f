"""The average of the weights that EMA keeps, in the commands: `--ema` and `--use_ema`."""

import pytest
import torch
from recipe_runs import curve, run, table
from safetensors.torch import load_file

from lit_llm.callbacks import ema
from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.adapters import averaged
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.core.errors import UserError

LAST = "checkpoints/last.ckpt"


@pytest.fixture
def trained(folder, capsys):
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--ema.decay", "0.8", "--run_dir", "tiny")
    assert code == 0, err
    return folder / "tiny"


def test_buffers_and_frozen_weights_have_no_average(tmp_path):
    content = {"state_dict": {"w": 1, "table": 2}, ema.AVERAGE: {"w": 3}}
    assert averaged(content, tmp_path, "--ema") == {"w": 3, "table": 2}
    with pytest.raises(UserError, match=r"holds no average of the weights: train with --ema EMA, or leave out --use_ema"):
        averaged({"state_dict": {"w": 1}}, tmp_path, "--use_ema")


@pytest.mark.slow
def test_commands_use_the_average_where_they_are_asked_to(trained, capsys):
    saved = disk_format.read(trained / LAST)
    assert saved[ema.AVERAGE].keys() == saved["state_dict"].keys()
    assert not any(torch.equal(saved["state_dict"][name], value) for name, value in saved[ema.AVERAGE].items())

    for name, value in load_model(trained / LAST, average=True).state_dict().items():
        assert torch.equal(value, saved[ema.AVERAGE][f"model.{name}"])
    assert run(capsys, "export", "--format", "ckpt", "--run", "tiny", "--out", "average.ckpt", "--weights", "--ema")[0] == 0
    consolidated = torch.load("average.ckpt", weights_only=True)
    assert ema.AVERAGE not in consolidated and consolidated["state_dict"].keys() == saved["state_dict"].keys()
    assert all(torch.equal(value, saved[ema.AVERAGE][name]) for name, value in consolidated["state_dict"].items())

    assert run(capsys, "export", "--run", "tiny", "--out", "of-average", "--ema")[0] == 0
    assert run(capsys, "export", "--run", "tiny", "--out", "of-weights")[0] == 0
    assert run(capsys, "export", "--run", "tiny", "--out", "of-file", "--ckpt_path", "average.ckpt")[0] == 0
    exported = {name: load_file(f"of-{name}/model.safetensors") for name in ("average", "weights", "file")}
    for name, value in exported["average"].items():
        assert torch.equal(value, exported["file"][name]) and not torch.equal(value, exported["weights"][name])

    logged = curve(trained, "val/loss")[8]  # of the average
    of_average, of_weights = (
        table(run(capsys, "validate", "--run", "tiny", *flags)[1])["val/loss"] for flags in (["--use_ema", "true"], [])
    )
    assert of_average == pytest.approx(logged, abs=1e-4) != pytest.approx(of_weights, abs=1e-3)


def test_adapters_have_an_average_and_their_base_has_none(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "1", "--schedule.warmup_steps", "1")[0] == 0
    short = ["--trainer.max_steps", "3", "--optimizer", "AdamW", "--optimizer.lr", "0.05", "--lora.rank", "2"]
    words = ["fit", "--config", "tiny.yaml", "--init_from", "runs/tiny", "--ema.decay", "0.8", "--run_dir", "tuned", *short]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    of_average = table(out)["val/loss"]
    evaluated = {flag: run(capsys, "validate", "--run", "tuned", "--use_ema", flag) for flag in ("true", "false")}
    assert evaluated["true"][0] == 0, evaluated["true"][2]
    assert table(evaluated["true"][1])["val/loss"] == of_average != table(evaluated["false"][1])["val/loss"]


@pytest.mark.slow
def test_a_run_starts_from_the_average_of_another_and_is_evaluated_by_its_own_weights(trained, capsys):
    still = ["--optimizer", "SGD", "--optimizer.lr", "0", "--trainer.max_steps", "2"]
    code, _, err = run(
        capsys, "fit", "--config", "tiny.yaml", "--init_from", "tiny", "--use_ema", "true", "--run_dir", "next", *still
    )
    assert code == 0, err
    expected, found = disk_format.read(trained / LAST)[ema.AVERAGE], disk_format.read(f"next/{LAST}")
    assert all(torch.equal(value, expected[name]) for name, value in found["state_dict"].items())
    assert ema.AVERAGE not in found and run(capsys, "validate", "--run", "next")[0] == 0
    for arguments in (
        ["validate", "--run", "next", "--use_ema", "true"],
        ["export", "--run", "next", "--out", "out", "--ema"],
        ["fit", "--config", "tiny.yaml", "--init_from", "next", "--use_ema", "true", "--run_dir", "third"],
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and "holds no average of the weights: train with --ema EMA, or leave out --" in err, err
    lora = ["--lora.rank", "2", "--optimizer", "AdamW", "--run_dir", "adapters"]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--init_from", "tiny", "--use_ema", "true", *lora)
    assert code == 2 and "`export --format ckpt --ema` (--use_ema)" in err, err
