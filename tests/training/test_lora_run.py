"""LoRA through the command line: what a run saves, how it continues, and that every command finds the base weights."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from recipe_runs import RECIPE, run, table

from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model

LORA = ["--config", "lora.yaml"]
LAST = "checkpoints/last.ckpt"


@pytest.fixture
def tuned(folder, capsys):
    """runs/base, and runs/tuned: four LoRA steps on it."""
    assert run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/base", "--trainer.max_steps", "2")[0] == 0
    recipe = yaml.safe_load(RECIPE)
    del recipe["model"]
    recipe |= {
        "init_from": "runs/base",
        "lora": {"rank": 2, "alpha": 8.0, "targets": ["query", "project"], "dropout": 0.1},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.02}},
        "trainer": {**recipe["trainer"], "max_steps": 4},
    }
    Path("lora.yaml").write_text(yaml.dump(recipe))
    code, out, err = run(capsys, "fit", *LORA, "--run_dir", "runs/tuned")
    assert code == 0, err
    # Width 16: query and attention.project have 2 (16 + 16) parameters in their adapters, mlp.project 2 (64 + 16).
    everything = sum(t.numel() for t in read(Path("runs/base") / LAST)["state_dict"].values()) + 288
    assert f"lora: 288 parameters are trained ({288 / everything:.2%}), rank 2\nbase: the frozen weights of runs/base/" in out
    return table(out)["val/loss"]


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return read(Path(run_dir) / LAST)["state_dict"]


def test_a_run_saves_adapters_continues_exactly_and_every_command_finds_the_base(tuned, capsys):
    saved, base = read(f"runs/tuned/{LAST}"), weights("runs/base")
    assert sorted(saved["state_dict"]) == sorted(
        f"model.blocks.0.{layer}.lora_{ab}" for layer in ("attention.query", "attention.project", "mlp.project") for ab in "ab"
    )
    assert len(saved["optimizer_states"][0]["state"]) == 6
    assert saved["lora"] == {"rank": 2, "alpha": 8.0, "targets": ["query", "project"], "dropout": 0.1}
    assert Path(saved["base"]["path"]) == Path("runs/base", LAST).resolve()
    # Interrupted after two steps.
    assert (
        run(capsys, "fit", *LORA, "--run_dir", "runs/parts", "--trainer.max_steps", "2", "--schedule.total_steps", "4")[0] == 0
    )
    code, out, err = run(capsys, "fit", "--run", "runs/parts", "--resume", "auto", "--trainer.max_steps", "4")
    assert code == 0 and "resume: from step 2" in out, err
    assert table(out)["val/loss"] == tuned
    parts = read(f"runs/parts/{LAST}")
    assert all(torch.equal(parts["state_dict"][name], tensor) for name, tensor in saved["state_dict"].items())
    for number, state in saved["optimizer_states"][0]["state"].items():
        assert all(torch.equal(parts["optimizer_states"][0]["state"][number][key], value) for key, value in state.items())
    # Merged by hand: scale 8 / 2.
    model = load_model(Path("runs/tuned") / LAST).state_dict()
    for name, tensor in model.items():
        layer = f"model.{name.removesuffix('weight')}"
        expected = base[f"model.{name}"]
        if f"{layer}lora_a" in saved["state_dict"]:
            update = 4 * saved["state_dict"][f"{layer}lora_b"] @ saved["state_dict"][f"{layer}lora_a"]
            assert update.abs().max() > 1e-3
            expected = expected + update
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-6)
    code, out, _ = run(capsys, "validate", "--run", "runs/tuned")
    assert code == 0 and table(out)["val/loss"] == tuned
    # The merged weights start another run, or are the frozen base of other adapters.
    flags = ["--init_from", "runs/tuned", "--trainer.max_steps", "1", "--optimizer.lr", "0", "--schedule.warmup_steps", "0"]
    code, out, _ = run(capsys, "fit", *LORA, *flags, "--run_dir", "runs/more", "--lora.rank", "1")
    assert code == 0 and table(out)["val/loss"] == pytest.approx(tuned, abs=2e-4)
    code, out, _ = run(capsys, "fit", *LORA, *flags, "--run_dir", "runs/whole", "--lora", "null")
    assert code == 0 and table(out)["val/loss"] == pytest.approx(tuned, abs=2e-4)
    more, whole = load_model(Path("runs/more") / LAST).state_dict(), weights("runs/whole")
    assert all(torch.equal(more[name], model[name]) and torch.equal(whole[f"model.{name}"], model[name]) for name in model)
    code, out, _ = run(capsys, "export", "--format", "ckpt", "--run", "runs/tuned", "--out", "one.ckpt")
    assert code == 0 and out.splitlines()[-1] == (
        f"note: it holds adapters only; their base weights stay in {saved['base']['path']} (`export` merges both)"
    )
    for command in (["generate"], ["validate"], ["export", "--out", "hf"]):  # a flag without an effect
        code, _, err = run(capsys, *command, "--run", "runs/whole", "--init_from", "runs/base")
        assert code == 2 and err.count("\n") == 1, err
        assert err.endswith("holds a whole model, no adapters, so it has no base weights to name: leave out --init_from\n")
    code, _, err = run(capsys, "export", "--adapter", "--out", "hf", "--run", "runs/tuned", "--init_from", "runs/base")
    assert code == 2 and "--adapter" in err and "--init_from" in err
    code, out, _ = run(capsys, "generate", "--run", "runs/tuned", "--max_new_tokens", "3", "--temperature", "0")
    assert code == 0 and out == run(capsys, "generate", "--run", "runs/whole", "--max_new_tokens", "3", "--temperature", "0")[1]


@pytest.mark.slow
def test_a_resume_refuses_another_base_and_says_where_a_missing_one_was(tuned, capsys):
    more = ["fit", "--run", "runs/tuned", "--resume", "auto", "--trainer.max_steps", "5"]
    for flags, expected in {
        ("--init_from", "runs/other"): "(--init_from /",
        ("--lora.rank", "4"): "lora.rank was 2 in the checkpoint and is 4 (--lora.rank 2)",
        ("--lora.alpha", "3"): "lora.alpha was 8.0 in the checkpoint and is 3.0 (--lora.alpha 8.0, or --accept_changes true)",
        ("--lora", "null"): "the checkpoint holds adapters, and lora is null (--lora.rank 2, or --config lora)",
    }.items():
        if not Path("runs/other").exists():
            shutil.copytree("runs/tuned", "runs/other", symlinks=True)  # weights, but not those
        code, _, err = run(capsys, *more, *flags)
        assert code == 2 and expected in err and len(err.splitlines()) == 1, err
    shutil.move("runs/base", "runs/elsewhere")
    missing = f"{Path('runs/base/checkpoints').resolve()}/step-00000002.ckpt are missing"
    # Where --init_from names adapters, it cannot name their base, too.
    nested = ["fit", *LORA, "--init_from", "runs/tuned", "--run_dir", "runs/nested", "--lora.rank", "1"]
    code, _, err = run(capsys, *nested)
    assert code == 2 and f"{missing}: put those weights, or a link to them, back there (--init_from)\n" in err, err
    assert len(err.splitlines()) == 1 and err.count("--init_from") == 1
    Path("runs/base").symlink_to("elsewhere")
    assert run(capsys, *nested)[0] == 0
    Path("runs/base").unlink()
    for command in ("validate", "generate"):
        code, _, err = run(capsys, command, "--run", "runs/nested")
        assert code == 2 and f"{missing}: put those weights, or a link to them, back there\n" in err, err
    for command in (["generate", "--run", "runs/tuned"], ["validate", "--run", "runs/tuned"], more):
        code, _, err = run(capsys, *command)
        assert code == 2 and missing in err and len(err.splitlines()) == 1, err
        moved = ["--max_new_tokens", "1"] if command[0] == "generate" else []
        assert run(capsys, *command, *moved, "--init_from", "runs/elsewhere")[0] == 0
    file = Path("runs/elsewhere", LAST, "checkpoint.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, _, err = run(capsys, *more[:-1], "6", "--init_from", "runs/elsewhere")
    assert code == 2 and "have changed since it was written" in err


@pytest.mark.slow
def test_what_lora_does_not_work_with_is_one_sentence(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "models")
    for flags, expected in {
        ("--lora.rank", "2"): "lora trains adapters beside frozen weights: name the run or the import that has them",
        ("--lora.targets", "query"): "lora.targets is 'query', it must be of type list[str], null",
        ("--lora.rank", "2", "--architecture", "custom_models.LSTMModel"): "lora adapts the linear layers of lit_llm's GPT",
    }.items():
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
        assert code == 2 and expected in err, err
    assert not Path("runs").exists()
