"""A model of the user's in a recipe: the same numbers as a loop written by hand, and everything else that a run can do."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from custom_models import LSTMModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F
from training_step import TrainingStep

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.data import TextFiles
from lit_llm.models.custom import Architecture
from lit_llm.models.loss import LossConfig
from lit_llm.plan.weights import OwnModel
from lit_llm.tokenizers import Bytes

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(200))
STEPS, RATE, DECAY, Z_LOSS = 6, 0.01, 0.1, 1e-3

RECIPE = """
architecture: {class_path: custom_models.LSTMModel, init_args: {width: 24}}
model: {block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, micro_batch_size: 2, global_batch_size: 4}
optimizer: {class_path: AdamW, init_args: {lr: 0.01, weight_decay: 0.1, betas: [0.9, 0.95]}}
schedule: {class_path: Cosine, init_args: {warmup_steps: 2, final_ratio: 0.1}}
gradient_norm: {class_path: GradientNorm, init_args: {clip: 0.5}}
loss: {z_loss: 0.001}
validation: {every_n_steps: 3}
checkpoint: {every_n_steps: 2}
samples: {class_path: TextSamples, init_args: {prompts: ["line "], every_n_steps: 3, max_new_tokens: 5}}
throughput: {peak_tflops: 1.0}
trainer: {max_steps: 6, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    Path("own.yaml").write_text(RECIPE)
    return tmp_path


def fit(*arguments: str) -> int:
    return main(["fit", "--config", "own.yaml", *arguments])


def curve(run: str, tag: str) -> dict[int, float]:
    events = EventAccumulator(run, size_guidance={"scalars": 0})
    events.Reload()
    return {e.step: e.value for e in events.Scalars(tag)}


def by_hand(data: TextFiles) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the recipe in plain torch: its schedule, clipping, decay and z-loss by their formulas."""
    model = LSTMModel(data.vocab_size, width=24)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    batches = iter(data.train_dataloader())
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        progress = (step - 2) / (STEPS - 2)
        scale = step / 2 if step <= 2 else 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * scale
        optimizer.zero_grad()
        total = 0.0
        for _ in range(2):  # micro-batches
            batch = next(batches)
            logits = model(batch["input_ids"]).flatten(0, 1)  # (B·T, V)
            nll = F.cross_entropy(logits, batch["targets"].flatten())
            ((nll + Z_LOSS * logits.logsumexp(-1).square().mean()) / 2).backward()
            total += nll.item() / 2
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return losses, norms


def test_it_trains_as_a_loop_by_hand_does(folder):
    assert fit() == 0
    data = TextFiles(paths="text.txt", micro_batch_size=2, global_batch_size=4, block_size=16)
    data.prepare_data()
    data.setup()
    losses, norms = by_hand(data)
    assert list(curve("runs/own", "train/loss").values()) == pytest.approx(losses, rel=1e-6)
    assert list(curve("runs/own", "grad/norm").values()) == pytest.approx(norms, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5  # it learns, or equality would say little
    recorded = yaml.safe_load(Path("runs/own/config.yaml").read_text())["model"]
    assert recorded.keys() == {"block_size", "vocab_size", "eos_id"}  # and no layers of a GPT


def test_flops_are_those_of_its_matrix_products_and_memory_is_planned(folder):
    assert fit() == 0
    products = sum(
        p.numel() for name, p in LSTMModel(257, width=24).named_parameters() if p.ndim == 2 and "embedding" not in name
    )
    speed, mfu = curve("runs/own", "throughput/tokens_per_second"), curve("runs/own", "throughput/mfu")
    assert {step: mfu[step] / speed[step] for step in mfu} == pytest.approx(dict.fromkeys(mfu, 6 * products / 1e12), rel=1e-5)
    tags = EventAccumulator("runs/own").Reload().Tags()
    assert "samples/line/text_summary" in tags["tensors"]
    config = OwnModel(vocab_size=257, block_size=16, architecture=Architecture("custom_models.LSTMModel", {"width": 24}))
    step = TrainingStep(
        config, partial(torch.optim.AdamW, lr=0.01), sequences=2, accumulation=2, loss=LossConfig(z_loss=Z_LOSS)
    )
    measured = step.peak_bytes() / 1e9
    assert curve("runs/own", "plan/peak_gb") == pytest.approx(dict.fromkeys(range(2, 7), measured), rel=0.1)


@pytest.mark.slow
def test_it_is_validated_generated_from_and_checked(folder, capsys):
    assert fit() == 0
    trained = curve("runs/own", "val/loss")[6]
    capsys.readouterr()
    assert main(["validate", "--run", "runs/own"]) == 0
    assert f"{trained:.4f}" in capsys.readouterr().out
    # Greedy text, beside the argmax of the weights in the file.
    assert main(["generate", "--run", "runs/own", "--prompt", "line 1", "--temperature", "0", "--max_new_tokens", "20"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    saved = read(Path("runs/own/checkpoints/last.ckpt"))
    model = LSTMModel(saved["model_config"]["vocab_size"], width=24)
    model.load_state_dict({name.removeprefix("model.network."): value for name, value in saved["state_dict"].items()})
    ids = list(b"line 1")
    for _ in range(20):
        # A context beyond block_size = 16 drops its older half, and grows again.
        ids_seen = ids if len(ids) <= 16 else ids[len(ids) - 8 - (len(ids) - 17) % 9 :]
        ids.append(int(model(torch.tensor([ids_seen]))[0, -1].argmax()))
    assert text == Bytes().decode(ids).rstrip("\n")
    assert main(["check", "--config", "own.yaml"]) in (0, 1)  # one line is about the speed of this machine
    table = capsys.readouterr().out
    assert "FAIL" not in "".join(line for line in table.splitlines() if "loader" not in line)
    main(["check", "--config", "own.yaml", "--architecture", "custom_models.SeesAhead"])
    assert any("FAIL" in line and "mask" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("optimizer", [pytest.param("AdamW", marks=pytest.mark.slow), "MuonAdamW"])
def test_a_resumed_run_is_the_same_run(folder, optimizer):
    flags = ["--optimizer", optimizer, "--architecture.dropout", "0.2"]
    assert fit(*flags, "--run_dir", "straight") == 0
    assert fit(*flags, "--run_dir", "parts", "--trainer.max_steps", "3", "--schedule.total_steps", "6") == 0
    assert fit(*flags, "--run_dir", "parts", "--resume", "auto") == 0
    for tag in ("train/loss", "grad/norm", "val/loss"):
        assert {s: v for s, v in curve("parts", tag).items() if s > 3} == {
            s: v for s, v in curve("straight", tag).items() if s > 3
        }
    one, other = (read(Path(run, "checkpoints/last.ckpt"))["state_dict"] for run in ("straight", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_resuming_as_another_model_is_refused(folder, capsys):
    assert fit("--trainer.max_steps", "2") == 0
    for flags, said in (
        (["--architecture.width", "32"], "architecture.width was 24 in the checkpoint and is 32"),
        (
            ["--architecture.width", "32", "--accept_changes", "true"],
            "does not fit this model: it has shape (96,) and the model's has (128,)",
        ),
        (["--architecture", "custom_models.ConvModel"], "architecture was custom_models.LSTMModel in the checkpoint"),
        (["--architecture", "null"], "the model was an architecture of yours, custom_models.LSTMModel"),
        (["--architecture.dropout", "0.5"], "--accept_changes true"),
    ):
        capsys.readouterr()
        assert fit("--resume", "auto", *flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and "Traceback" not in line
    assert fit("--resume", "auto", "--architecture.dropout", "0.5", "--accept_changes", "true") == 0


def test_init_from_takes_weights_and_architecture_from_a_run(folder):
    assert fit("--trainer.max_steps", "2") == 0
    tune = {**yaml.safe_load(RECIPE), "model": {}, "data": {"class_path": "TextFiles", "init_args": {"paths": "text.txt"}}}
    tune["data"]["init_args"] |= {"global_batch_size": 2, "block_size": 8}
    del tune["architecture"]
    Path("tune.yaml").write_text(yaml.safe_dump(tune))
    still = ["--trainer.max_steps", "1", "--optimizer.lr", "0", "--schedule.warmup_steps", "0"]
    assert main(["fit", "--config", "tune.yaml", "--init_from", "runs/own", *still]) == 0
    one, other = (read(Path(f"runs/{run}/checkpoints/last.ckpt"))["state_dict"] for run in ("own", "tune"))
    assert all(torch.equal(one[name], other[name]) for name in one)


MISTAKES = {
    "no such module": (["--architecture", "nowhere.Model"], "nowhere.Model was not found: No module named 'nowhere'"),
    "no such class": (
        ["--architecture", "custom_models.Nope"],
        "architecture custom_models.Nope was not found: module 'custom_models'",
    ),
    "no class path": (
        ["--architecture", "Nope"],
        "architecture is 'Nope'. Expected a dotted class path such as my_project.MyModel (--architecture).",
    ),
    "a relative path": (["--architecture", ".custom_models.LSTMModel"], "Expected a dotted class path such as my_project"),
    "no module": (["--architecture", "custom_models.NoModule"], "architecture custom_models.NoModule is not a torch.nn.Module"),
    "no vocab_size": (
        ["--architecture", "custom_models.WithoutVocabulary"],
        "architecture custom_models.WithoutVocabulary needs an __init__ argument vocab_size",
    ),
    "vocab_size given": (["--architecture.vocab_size", "9"], "unknown key architecture.vocab_size"),
    "an unknown argument": (["--architecture.widht", "9"], "unknown key architecture.widht; did you mean architecture.width?"),
    "a class within": (
        ["--architecture", "custom_models.OtherActivation", "--architecture.activation", "torch.nn.GELU"],
        "architecture.activation is a class, but init_args must be plain values",
    ),
    "another output": (
        ["--architecture", "custom_models.LastLogitsOnly"],
        "returns torch.float32 of shape (2, 257) for input_ids of shape (2, 16), but must return logits of shape (2, 16, 257)",
    ),
    "blocks in a list": (["--architecture", "custom_models.ListOfBlocks"], "blocks is a list, but must be an nn.ModuleList"),
    "a setting of the other model": (
        ["--model.n_layer", "3"],
        "model.n_layer is 3, but custom_models.LSTMModel does not read it",
    ),
    "chunks of logits": (["--loss.chunk_size", "8"], "loss.chunk_size is 8, but custom_models.LSTMModel returns all logits"),
    "attention checkpointing": (
        ["--compute.activation_checkpointing", "attention"],
        "compute.activation_checkpointing attention supports lit_llm's GPT, not custom_models.LSTMModel",
    ),
    "blocks that are not there": (
        ["--architecture", "custom_models.ConvModel", "--compute.activation_checkpointing", "full"],
        "compute.activation_checkpointing needs the model's blocks, but custom_models.ConvModel has none",
    ),
    "tensor parallelism": (
        ["--config", "strategy/tp", "--trainer.devices=2", "--trainer.accelerator=cpu"],
        "tensor_parallel=2 works with lit_llm's GPT only, not with custom_models.LSTMModel",
    ),
    "ranks that share a sequence": (
        ["--config", "strategy/cp", "--trainer.devices=2", "--trainer.accelerator=cpu"],
        "context=2 works with lit_llm's GPT only, not with custom_models.LSTMModel",
    ),
    "a pipeline": (
        ["--config", "strategy/pp", "--trainer.devices=2", "--trainer.accelerator=cpu"],
        "custom_models.LSTMModel cannot be cut between its layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 5 == 0 else pytest.mark.slow) for i, name in enumerate(MISTAKES)]
)
def test_a_mistake_is_reported_in_one_line_and_leaves_no_run_folder(folder, capsys, name):
    flags, said = MISTAKES[name]
    assert fit(*flags) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]  # of a dropped argument
    assert len(lines) == 1 and said in lines[0], lines
    assert not Path("runs/own").exists()


def test_commands_that_need_the_gpt_refuse_a_custom_model(folder, capsys):
    assert fit("--trainer.max_steps", "2") == 0
    capsys.readouterr()
    assert main(["export", "--run", "runs/own", "--out", "hf"]) == 2
    assert "transformers has no class for custom_models.LSTMModel" in capsys.readouterr().err
    assert not Path("hf").exists()
