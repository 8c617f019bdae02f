"""Runs that start from imported weights: evaluation agrees with transformers, and export writes the tuned weights."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from folders import SIZE, randomise
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.commands.import_hf import import_folder
from lit_llm.tokenizers import Bytes, load_tokenizer

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(200))
RECIPE = """
data:
  class_path: TextFiles
  init_args: {train: train.txt, val: val.txt, micro_batch_size: 2, global_batch_size: 2}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.003}}
schedule: {class_path: Constant}
trainer: {max_steps: 2, log_every_n_steps: 1, accelerator: cpu}
"""
SMALL = """
data:
  init_args:
    sources: {new: {path: shards/new}, old: {path: shards/old, max_epochs: null}, best: {path: shards/best}}
    block_size: 48
    micro_batch_size: 10
    global_batch_size: 20
optimizer: {init_args: {lr: 0.003}}
schedule: {init_args: {warmup_steps: 2, decay_fraction: 0.25}}
trainer: {max_steps: 4, log_every_n_steps: 1, accelerator: cpu, precision: 32-true}
"""
"""An overlay of recipes/cpt.yaml, which starts from runs/base."""
CONTEXT = 48


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with hf/ (Qwen3, byte tokenizer), its import runs/base, two texts and a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    Path("train.txt").write_text(TEXT)
    Path("val.txt").write_text(TEXT[100:3000].swapcase())
    Path("tune.yaml").write_text(RECIPE)
    torch.manual_seed(3)
    config = Qwen3Config(**{**SIZE, "vocab_size": 257, "max_position_embeddings": CONTEXT, "eos_token_id": 256}, head_dim=12)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    model.save_pretrained("hf")
    Bytes().save("hf")
    import_folder(Path("hf"), Path("runs/base"))
    return model


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    return code, *capsys.readouterr()


def table(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(val/[\w/]+)\s*│\s*([\d.]+)", out)}


@torch.no_grad()
def loss_of(model) -> float:
    """Mean nats per token of val.txt and the end of its document, in blocks of CONTEXT."""
    stream = torch.tensor([*Path("val.txt").read_bytes(), 256])
    total = 0.0
    for start in range(0, len(stream) - 1, CONTEXT):
        block = stream[start : start + CONTEXT + 1]
        total += float(F.cross_entropy(model(block[None, :-1]).logits[0], block[1:], reduction="sum"))
    return total / (len(stream) - 1)


@pytest.mark.slow
def test_an_imported_folder_is_evaluated_and_tuned_and_exported(folder, capsys):
    expected = loss_of(folder)
    code, out, _ = run(capsys, "validate", "--run", "runs/base", "--data", "TextFiles", "--data.train", "train.txt",
                       "--data.val", "val.txt")  # fmt: skip
    assert code == 0 and table(out)["val/loss"] == pytest.approx(expected, abs=2e-4)
    # Training with a rate of zero keeps the imported weights, with a new optimizer and step 1.
    code, out, _ = run(capsys, "fit", "--init_from", "runs/base", "--config", "tune.yaml", "--run_dir", "runs/still",
                       "--optimizer.lr", "0", "--trainer.max_steps", "1")  # fmt: skip
    assert code == 0 and "start: the weights of runs/base" in out
    assert table(out)["val/loss"] == pytest.approx(expected, abs=2e-4)
    still, base = (read(Path("runs") / name / "checkpoints/last.ckpt") for name in ("still", "base"))
    assert still["global_step"] == 1 and still["model_config"]["head_dim"] == 12
    assert all(torch.equal(still["state_dict"][name], tensor) for name, tensor in base["state_dict"].items())
    # Continued pre-training on a mixture of new, old and better text improves the loss, and export writes the trained weights.
    Path("old.txt").write_text(TEXT[:3000].upper())
    tokenizer = ["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "runs/base/tokenizer.json"]
    for name, text in {"new": "train.txt", "old": "old.txt", "best": "val.txt"}.items():
        parts = ["--data.train", text, "--data.val", "val.txt"] if name == "new" else ["--data.paths", text]
        code, _, err = run(capsys, "prepare", "--data", "TextFiles", *tokenizer, *parts, "--out", f"shards/{name}")
        assert code == 0, err
    Path("small.yaml").write_text(SMALL)
    code, out, err = run(capsys, "fit", "--config", "cpt", "--config", "small.yaml", "--run_dir", "runs/tuned")
    assert code == 0, err
    assert "start: the weights of runs/base" in out and table(out)["val/new/loss"] < expected - 0.05
    rates = [float(rate) for rate in re.findall(r"lr ([\d.e+-]+)", out)]
    assert rates == pytest.approx([0.0015, 0.003, 0.003, 0.0003])  # warmed up again, stable, decayed to a tenth
    tuned = table(out)["val/new/loss"]
    assert json.loads(Path("runs/tuned/generation_config.json").read_text())["eos_token_id"] == 256
    assert run(capsys, "export", "--run", "runs/tuned", "--out", "out")[0] == 0
    assert loss_of(AutoModelForCausalLM.from_pretrained("out").eval()) == pytest.approx(tuned, abs=2e-4)
    assert AutoTokenizer.from_pretrained("out")("line")["input_ids"] == list(b"line")


@pytest.mark.slow
def test_an_interrupted_tuning_continues_and_does_not_start_again(folder, capsys):
    Path("tune.yaml").write_text(RECIPE + "init_from: runs/base\n")  # as a key of the recipe
    flags = ["--config", "tune.yaml", "--trainer.max_steps"]
    assert run(capsys, "fit", *flags, "4", "--run_dir", "runs/straight")[0] == 0
    assert run(capsys, "fit", *flags, "2", "--run_dir", "runs/parts")[0] == 0
    code, out, _ = run(capsys, "fit", *flags, "4", "--run_dir", "runs/parts", "--resume", "auto")
    assert code == 0 and "start: the weights" not in out
    a, b = (read(Path("runs") / name / "checkpoints/last.ckpt")["state_dict"] for name in ("straight", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    # The tuned run's config.yaml names its initial weights, but evaluation reads its own.
    assert "init_from: runs/base" in Path("runs/parts/config.yaml").read_text()
    # The initial weights are no longer needed.
    Path("runs/base").rename("runs/elsewhere")
    code, out, err = run(capsys, "fit", "--run", "runs/parts", "--resume", "auto", "--trainer.max_steps", "5")
    assert code == 0 and "resume: from step 4" in out, err
    Path("runs/elsewhere").rename("runs/base")
    assert run(capsys, "validate", "--run", "runs/parts")[0] == 0


@pytest.mark.slow
def test_settings_that_no_shape_depends_on_can_be_changed_and_those_that_weights_depend_on_are_announced(folder, capsys):
    flags = ["fit", "--init_from", "runs/base/checkpoints/last.ckpt", "--config", "tune.yaml", "--trainer.max_steps", "1"]
    code, out, _ = run(capsys, *flags, "--run_dir", "runs/tuned", "--model.block_size", "32", "--model.dropout", "0.1",
                       "--model.mask_documents", "true")  # fmt: skip
    assert code == 0 and "were trained with" not in out
    code, out, _ = run(capsys, *flags, "--run_dir", "runs/other", "--model.rope_theta", "5", "--model.window", "9",
                       "--model.parallel_residual", "true")  # fmt: skip
    assert code == 0 and [line for line in out.splitlines() if line.startswith("start: model.")] == [
        "start: model.parallel_residual false → true: the weights were trained with the former",
        "start: model.rope_theta 10000.0 → 5.0: the weights were trained with the former",
        "start: model.window null → 9: the weights were trained with the former",
    ]
    saved = read("runs/tuned/checkpoints/last.ckpt")["model_config"]
    assert (saved["block_size"], saved["dropout"], saved["n_layer"]) == (32, 0.1, 3)


BOS = ["--data.tokenizer.bos_token", "Ā"]
"""The byte 0, which no text here has."""


def test_a_bos_can_be_named_for_imported_weights(folder, capsys):
    words = ["fit", "--config", "tune.yaml", "--config", "lora", "--init_from", "runs/base", "--trainer.max_steps", "1"]
    code, _, err = run(capsys, *words, *BOS, "--run_dir", "runs/text")
    assert code == 0, err
    (shard,) = Path("cache").rglob("*train*.bin")
    assert np.fromfile(shard, np.uint16)[512] == 0, "after the header, the first document begins"
    assert run(capsys, "export", "--run", "runs/text", "--out", "adapter", "--adapter")[0] == 0
    for tokenizer in (load_tokenizer("runs/text"), load_tokenizer("adapter")):
        assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 256)


@pytest.mark.slow
def test_shards_say_whether_documents_begin_with_a_bos_that_the_weights_do_not_name(folder, capsys):
    read_by = ["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "runs/base", "--data.train", "train.txt"]
    for name, more in {"with": BOS, "without": []}.items():
        words = ["prepare", "--data", "TextFiles", *read_by, *more, "--data.val", "val.txt", "--out", name]
        assert run(capsys, *words)[0] == 0
    recipe = RECIPE.replace("TextFiles", "TokenShards").replace("train: train.txt, val: val.txt", "path: with")
    Path("shards.yaml").write_text(recipe)
    tune = ["fit", "--init_from", "runs/base", "--config", "shards.yaml", "--run_dir", "runs/shards"]
    code, _, err = run(capsys, *tune, "--data.path", "without", *BOS)
    assert code == 2 and "--data.tokenizer.bos_token" in err and "without" in err, err
    for more in ([], ["--resume", "auto", "--trainer.max_steps", "3", *BOS]):
        code, _, err = run(capsys, *tune, *more)
        assert code == 0, err
        assert load_tokenizer("runs/shards").bos_id == 0


MISTAKES = {
    "nothing there": (["--init_from", "runs/none"], "there is no run folder or checkpoint runs/none (--init_from)"),
    "a Hugging Face folder": (["--init_from", "hf"], "python -m lit_llm import --from hf --out RUN"),
    "an empty run": (["--init_from", "runs"], "has no checkpoint 'last'"),
    "another shape": (["--init_from", "runs/base", "--model.n_layer", "5"], "--model.n_layer 3"),
    "another tokenizer": (
        ["--init_from", "runs/base", "--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "257"],
        "the data's tokenizer is not that of the weights in runs/base/checkpoints/last.ckpt",
    ),
    "not a checkpoint": (["--init_from", "tune.yaml"], "tune.yaml"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_starts_no_run(name, folder, capsys):
    arguments, expected = MISTAKES[name]
    code, _, err = run(capsys, "fit", "--config", "tune.yaml", "--run_dir", "runs/new", *arguments)
    assert code == 2 and expected in err, err
    assert len(err.splitlines()) == 1 and not Path("runs/new").exists()


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["validate"], ["plan"], ["export", "--out", "out"]])
def test_a_command_on_a_hugging_face_folder_says_how_to_import_it(command, folder, capsys):
    code, _, err = run(capsys, *command, "--run", "hf")
    assert code == 2 and "python -m lit_llm import --from hf --out RUN (--run)" in err and err.count("\n") == 1, err
