"""The command line as a user sees it: exit codes, messages, run folders, and resuming."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from recipe_runs import curve, run, table

from lit_llm.models.generation import generate, generate_all


def test_fit_then_validate_then_generate(folder, capsys, monkeypatch):
    prompts = []

    def observed(model, prompt, **options):
        prompts.append(prompt)
        return generate(model, prompt, **options)

    def observed_all(texts, prompts_of_batch, **options):
        prompts.extend(prompts_of_batch)
        return generate_all(texts, prompts_of_batch, **options)

    monkeypatch.setattr("lit_llm.training.answers.generate", observed)
    monkeypatch.setattr("lit_llm.commands.text_model.generate_all", observed_all)
    samples = ["--samples", "TextSamples", "--samples.prompts", "[line]", "--samples.every_n_steps", "8"]
    code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--model.mask_documents", "true", *samples)
    assert code == 0
    fitted = table(out)
    beside = {"val/bits_per_token", "val/gzip_bits_per_byte", "val/xz_bits_per_byte"}
    assert set(fitted) == {"val/loss", "val/perplexity", "val/bits_per_byte"} | beside
    assert fitted["val/bits_per_token"] == pytest.approx(math.log2(math.exp(fitted["val/loss"])), abs=2e-4)
    made = Path("runs/tiny")
    assert {"config.yaml", "tokenizer.json", "checkpoints"} <= {p.name for p in made.iterdir()}
    # the x-axis is the optimizer step, for every curve
    assert sorted(curve(made, "train/loss")) == list(range(1, 9))
    assert sorted(curve(made, "lr")) == list(range(1, 9))
    assert sorted(curve(made, "val/loss")) == [4, 8]
    assert curve(made, "progress/tokens") == {s: s * 4 * 16 for s in range(1, 9)}
    # evaluated again from the checkpoint, by another command, it is the same number
    events_before = sorted(p.name for p in made.glob("events*"))
    code, out, _ = run(capsys, "validate", "--run", "runs/tiny")
    assert code == 0 and table(out) == fitted
    split = r"validation split: [\d,]+ tokens of TextFiles, 10% of --data.paths .* --data.train OTHER --data.val FILE"
    assert re.search(split, out), out
    assert sorted(p.name for p in made.glob("events*")) == events_before, "validate writes no curve"
    code, out, _ = run(capsys, "generate", "--run", "runs/tiny", "--prompt", "line ", "--max_new_tokens", "9")
    assert code == 0 and out.startswith("line ") and len(out) > len("line \n")
    code, _, err = run(capsys, "generate", "--run", "runs/tiny", "--chat")
    assert code == 2 and "or write one to runs/tiny/chat_template.jinja" in err and "--data.chat_template" not in err
    code, shown, _ = run(capsys, "recipes", "show", "sft", "--init_from", "runs/tiny")
    assert shown.startswith("# The model and the tokenizer are those of runs/tiny, which is here (init_from).")
    again = run(capsys, "generate", "--run=runs/tiny", "--prompt=line ", "--max-new-tokens=9")[1]
    assert again == out
    # Masked documents begin with the end of the one before, so prompts do.
    assert prompts == [[256, *b"line"], *[[256, *b"line "]] * 2]


def test_the_saved_config_runs_again_as_it_is_and_makes_the_same_losses(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml")
    code, *_ = run(capsys, "fit", "--config", "runs/tiny/config.yaml", "--run_dir", "runs/again")
    assert code == 0
    assert curve(Path("runs/again"), "train/loss") == curve(Path("runs/tiny"), "train/loss")


def test_a_resumed_run_continues_exactly_and_in_the_same_curves(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/straight")
    run(
        capsys,
        "fit",
        "--config",
        "tiny.yaml",
        "--run_dir",
        "runs/parts",
        "--trainer.max_steps",
        "5",
        "--schedule.total_steps",
        "8",
    )
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/parts", "--resume", "auto")
    assert code == 0
    for tag in ("train/loss", "lr", "grad/norm", "progress/tokens"):
        assert curve(Path("runs/parts"), tag) == curve(Path("runs/straight"), tag), tag
    assert curve(Path("runs/parts"), "val/loss")[8] == curve(Path("runs/straight"), "val/loss")[8]


def test_resuming_a_finished_run_trains_nothing_and_prints_its_table(folder, capsys):
    first = table(run(capsys, "fit", "--config", "tiny.yaml")[1])
    code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")
    assert code == 0 and table(out) == first
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == list(range(1, 9))


def test_an_existing_run_is_not_overwritten_but_can_be_set_aside(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml")
    assert code == 2 and "--resume auto" in err and "--replace true" in err and "--run_dir" in err
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--replace", "true", "--trainer.max_steps", "3")
    assert code == 0
    assert sorted(curve(Path("runs/tiny.1"), "train/loss")) == list(range(1, 9))
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == [1, 2, 3]


def test_my_own_text_trains_any_recipe_and_the_vocabulary_follows(folder, capsys):
    (folder / "mine.txt").write_text("so many words, so little time\n" * 200)
    code, out, _ = run(
        capsys, "fit", "--config", "tiny.yaml", "--data", "TextFiles", "--data.paths", "mine.txt",
        "--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "270", "--trainer.max_steps", "2",
    )  # fmt: skip
    assert code == 0 and "vocabulary 270" in out


def test_prepared_shards_can_be_trained_on_with_the_printed_flags(folder, capsys):
    code, out, _ = run(capsys, "prepare", "--config", "tiny.yaml", "--out", "shards")
    assert code == 0
    flags = out.split("--config RECIPE ")[1].replace("'", "").split()
    code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *flags, "--trainer.max_steps", "2")
    assert code == 0 and "val/bits_per_byte" in table(out)


@pytest.mark.parametrize("name", ["Linear", "Constant", "InverseSquareRoot", "WSD"])
def test_a_schedule_is_swapped_by_its_name(folder, capsys, name):
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--schedule", name)
    assert code == 0
    rates = curve(Path("runs/tiny"), "lr")
    assert rates[1] == pytest.approx(rates[2] / 2)  # two warmup steps, whatever comes after


@pytest.mark.parametrize("name", ["torch.optim.SGD", "AdamW", "Lion", "torch.optim.Adafactor"])
def test_an_optimizer_is_swapped_by_its_name(folder, capsys, name):
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--optimizer", name, "--optimizer.lr", "0.001")
    assert code == 0
    assert max(curve(Path("runs/tiny"), "lr").values()) == pytest.approx(0.001)


def test_a_stock_callback_works_beside_ours(folder, capsys):
    (folder / "stop.yaml").write_text(
        "trainer:\n  callbacks+:\n  - class_path: lightning.pytorch.callbacks.EarlyStopping\n"
        "    init_args: {monitor: val/loss, patience: 1, min_delta: 100.0}\n"
    )
    flags = ("--config", "tiny.yaml", "--config", "stop.yaml", "--validation.every_n_steps", "2")
    code, *_ = run(capsys, "fit", *flags)
    assert code == 0
    assert sorted(curve(Path("runs/tiny"), "val/loss")) == [2, 4]  # never better by 100 nats: stopped at the second look


def test_what_a_callback_logs_by_self_log_is_at_its_optimizer_step(folder, capsys, monkeypatch):
    (folder / "logs_steps.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Steps(Callback):\n"
        "    def on_train_batch_end(self, trainer, module, *_):\n"
        "        module.log('own/step', float(trainer.global_step))\n\n"
        "    def on_validation_epoch_end(self, trainer, module):\n"
        "        module.log('own/validated', float(trainer.global_step))\n"
    )
    (folder / "own.yaml").write_text("trainer: {log_every_n_steps: 2, callbacks+: [{class_path: logs_steps.Steps}]}\n")
    monkeypatch.syspath_prepend(str(folder))
    flags = ("--config", "tiny.yaml", "--config", "own.yaml", "--validation.every_n_steps", "2")
    code, *_ = run(capsys, "fit", *flags, "--data.micro_batch_size", "1")  # several micro-batches in a step
    steps, validated = (curve(Path("runs/tiny"), name) for name in ("own/step", "own/validated"))
    assert code == 0 and len(steps) > 1 and len(validated) > 1
    assert all(step == value for each in (steps, validated) for step, value in each.items())


def test_data_without_val_dataloader_train_and_are_not_validated(folder, capsys, monkeypatch):
    (folder / "no_validation.py").write_text(
        "import lightning as L\nimport torch\nfrom torch.utils.data import DataLoader\n\n\n"
        "class Counting(L.LightningDataModule):\n"
        "    vocab_size = 64\n\n    def train_dataloader(self):\n        ids = torch.arange(9) + torch.arange(32)[:, None]\n"
        "        return DataLoader([{'input_ids': row[:-1], 'targets': row[1:]} for row in ids], batch_size=4)\n"
    )
    (folder / "counting.yaml").write_text(
        "model: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 8}\ndata: {class_path: no_validation.Counting}\n"
        "trainer: {max_steps: 4, accelerator: cpu, log_every_n_steps: 1}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert run(capsys, "fit", "--config", "counting.yaml")[0] == 0
    assert sorted(curve(Path("runs/counting"), "train/loss")) == [1, 2, 3, 4]
    code, _, err = run(capsys, "validate", "--run", "runs/counting")[:3]
    assert code == 2 and "(--data)" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_a_least_length_above_the_longest_is_refused(folder, capsys, unit):
    flags = (f"--trainer.min_{unit}", "20", f"--trainer.max_{unit}", "12")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)[:3]
    assert code == 2 and f"(--trainer.max_{unit} 20)" in err and not Path("runs/tiny").exists()


def test_a_group_that_is_null_is_left_out(folder, capsys):
    code, out, _ = run(
        capsys, "fit", "--config", "tiny.yaml", "--checkpoint", "null", "--validation", "null", "--schedule", "null"
    )
    assert code == 0 and "val/loss" in table(out)  # validated once, at the end
    assert not Path("runs/tiny/checkpoints").exists()
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/b", "--trainer.limit_val_batches", "0")
    assert code == 0


def test_a_replacement_that_is_refused_puts_the_old_run_back(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml")
    before = curve(Path("runs/tiny"), "train/loss")
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--replace", "true", "--trainer.gradient_clip_val", "1")
    assert code == 2
    assert curve(Path("runs/tiny"), "train/loss") == before
    assert [p.name for p in Path("runs").iterdir()] == ["tiny"]


def test_a_run_that_breaks_later_keeps_its_curves(folder, capsys):
    (folder / "stop.yaml").write_text(
        "trainer:\n  callbacks+:\n  - class_path: lightning.pytorch.callbacks.EarlyStopping\n"
        "    init_args: {monitor: val/losss}\n"
    )
    flags = ("--checkpoint", "null", "--validation.every_n_steps", "2")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "stop.yaml", *flags)
    assert code == 2 and "val/losss" in err
    assert curve(Path("runs/tiny"), "train/loss")


def test_the_last_line_shows_the_rate_and_norm_of_its_own_step(folder, capsys):
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--trainer.log_every_n_steps", "5")
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/8", "5/8", "8/8"] and all("loss" in line for line in lines)
    shown = r"step 8/8  loss [\d.]+ \(mean of 3\)  ppl [\d.]+  lr ([\d.e-]+)  grad ([\d.]+)  ETA 0s"
    assert (last := re.fullmatch(shown, lines[-1])) is not None
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--trainer.log_every_n_steps", "1", "--run_dir", "runs/every")
    [every] = [line for line in out.splitlines() if line.startswith("step 8/8")]
    assert f"  lr {last[1]}  " in every and f"  grad {last[2]}  " in every
    assert out.count("training ended after step 8: reached trainer.max_steps=8") == 1


# -- mistakes -------------------------------------------------------------------------------------------------------


def lightnings(*callbacks: str) -> str:
    """An overlay with callbacks of Lightning, each written as `Class: {argument: value}`."""
    chosen = [name.partition(": ")[::2] for name in callbacks]
    listed = ", ".join(f"{{class_path: lightning.pytorch.callbacks.{name}, init_args: {given}}}" for name, given in chosen)
    return f"trainer: {{callbacks+: [{listed}]}}"


MISTAKES = {
    "unknown key in a config": ([], "model: {n_layr: 2}", ["n_layr", "model.n_layer"]),
    "unknown flag": (["--model.n_heds", "2"], "", ["n_heds", "model.n_head"]),
    "unknown key of a class": (["--data.globl_batch_size", "2"], "", ["data.global_batch_size"]),
    "a key in the wrong group": (["--trainer.warmup_steps", "2"], "", ["schedule.warmup_steps"]),
    "wrong type": (["--model.n_layer", "many"], "", ["model.n_layer", "'many'", "int"]),
    "wrong type in a config": ([], "trainer: {max_steps: soon}", ["trainer.max_steps", "'soon'", "int"]),
    "wrong choice": (["--model.mlp", "silu"], "", ["model.mlp", "swiglu"]),
    "unknown class": (["--schedule", "Cosin"], "", ["Cosine", "WSD"]),
    "a class in small letters": (["--optimizer", "adamw"], "", ["did you mean AdamW?"]),
    "heads that do not divide": (["--model.n_head", "3"], "", ["n_head=3", "n_embd=16", "2, 4"]),
    "batch that does not divide": (
        ["--data.global_batch_size", "5", "--trainer.devices", "2"], "", ["5", "4 or 6", "--data.global_batch_size"]
    ),
    "missing text": (["--data.paths", "nowhere.txt"], "", ["nowhere.txt", "--data.paths"]),
    "empty text": (["--data.paths", "empty.txt"], "", ["empty.txt"]),
    "text shorter than a block": (["--data.paths", "short.txt"], "", ["17", "--model.block_size"]),
    "shard with a wrong magic": (
        ["--data", "TokenShards", "--data.train", "bad.bin", "--data.val", "bad.bin"], "", ["bad.bin", "magic"]
    ),
    "missing config": (["--config", "nowhere.yaml"], "", ["nowhere.yaml", "--config"]),
    "config that is no YAML": (["--config", "text.txt"], "", ["text.txt"]),
    "missing checkpoint": (["--resume", "nowhere.ckpt"], "", ["nowhere.ckpt", "--resume"]),
    "warmup below zero": (["--schedule.warmup_steps", "-1"], "", ["-1", "--schedule.warmup_steps"]),
    "learning rate below zero": (["--optimizer.lr", "-1"], "", ["-1", "--optimizer.lr"]),
    "warmup beyond the end": (["--schedule.warmup_steps", "50"], "", ["50", "--schedule.warmup_steps"]),
    "no end": (["--trainer.max_steps", "-1"], "", ["--trainer.max_steps"]),
    "logging every 0 steps": (["--trainer.log_every_n_steps", "0"], "", ["--trainer.log_every_n_steps"]),
    "two things that clip": (["--trainer.gradient_clip_val", "1"], "", ["--trainer.gradient_clip_val"]),
    "a run folder that is a file": (["--run_dir", "text.txt"], "", ["text.txt", "--run_dir"]),
    "a missing tokenizer": (["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "no.json"], "", ["no.json"]),
    "a value alone": (["fast"], "", ["'fast'"]),
    "no devices": (["--trainer.devices", "0"], "", ["trainer.devices is 0,", "at least 1", "--trainer.devices 1"]),
    "devices below zero": (["--trainer.devices", "-3"], "", ["trainer.devices is -3,", "at least 1"]),
    "all GPUs of a CPU": (["--trainer.devices", "-1"], "", ["trainer.devices is -1,", "on a CPU", "--trainer.devices 1"]),
    "devices in words": (["--trainer.devices", "two"], "", ["'two'", "--trainer.devices auto"]),
    "a device twice": (["--trainer.devices", "[1,1]"], "", ["twice", "--trainer.devices [1]"]),
    "a precision that is none": (
        ["--trainer.precision", "bf17"], "", ["trainer.precision is 'bf17', it must be one of", "(nearest: bf16)", "bf16-mixed"]
    ),
    "factors that are rounded to bf16": (
        ["--optimizer", "AdamW", "--optimizer.foreach", "true", "--trainer.precision", "bf16-true"], "",
        ["optimizer.foreach is true", "0.999 is 1 in bf16 (--optimizer.foreach false)"],
    ),
    "a strategy that is none": (["--trainer.strategy", "fspd"], "", ["trainer.strategy is 'fspd'", "did you mean fsdp?"]),
    "a strategy's class that is none": (["--trainer.strategy", "lightning.Nope"], "", ["trainer.strategy is 'lightning.Nope'"]),
    "checkpoints elsewhere": (["--checkpoint.dirpath", "else"], "", ["checkpoint.dirpath is else", "--run_dir"]),
    "an accelerator that is none": (["--trainer.accelerator", "cpuu"], "", ["'cpuu'", "did you mean cpu?"]),
    "a profiler that is none": (["--trainer.profiler", "x"], "", ["trainer.profiler is 'x'", "simple, advanced"]),
    "a class without what it needs": (["--samples", "TextSamples"], "", ["samples is TextSamples, which needs prompts"]),
    "a class that is another kind": (["--optimizer", "torch.nn.Linear"], "", ["not a class that can be used here"]),
    "an argument that a class needs": (
        ["--batch_ramp", "BatchRamp", "--batch_ramp.tokens_per_batch", "[[0]]"], "", ["batch_ramp.tokens_per_batch is '[[0]]'"]
    ),
    "a rate in words": (["--optimizer.lr", "abc"], "", ["optimizer.lr is 'abc', it must be of type float"]),
    "a rate of another class in words": (["--optimizer", "AdamW", "--optimizer.lr", "abc"], "", ["of type float, Tensor ("]),
    "a mistake beside a number that may be text": (["--optimizer.lr", "abc"], "trainer: {devices: 1}", ["of type float ("]),
    "a weight without what it weighs": (["--loss.ahead_weight", "0.1"], "", ["loss.ahead_weight is 0.1", "predict_ahead 1"]),
    "a base of rotations without any": (
        ["--model.position", "learned", "--model.rope_theta", "5"], "", ["model.rope_theta is 5.0", "rope_theta 10000.0"]
    ),
    "a rate as text": (["--optimizer.lr", "nan"], "", ["optimizer.lr is 'nan', it must be of type float"]),
    "an empty number": (["--data.micro_batch_size", ""], "", ["data.micro_batch_size is '', it must be of type int, null"]),
    "a number of letters": (["--model.n_layer", "x" * 9000], "", ["model.n_layer is 'xxx", "of type int"]),
    "a group as a number": ([], "trainer: 3", ["trainer is 3, but must be a dict of settings", "in overlay.yaml"]),
    "a group as a list": ([], "model: [n_layer, 2]", ["model is ['n_layer', 2], but must be a dict of settings"]),
    "init_args as a list": ([], "schedule: {class_path: WSD, init_args: [1]}", ["schedule.init_args is [1], but must"]),
    "a class as a number": ([], "schedule: {class_path: 3}", ["schedule is 3, which is not a class", "known: Constant"]),
    "an argument beside and in init_args": (
        [], "schedule: {class_path: WSD, shape: linear, init_args: {shape: linear}}", ["sets schedule.shape twice"]
    ),
    "an empty list of callbacks' class": (["--trainer.callbacks", "abc"], "", ["there is no callback abc"]),
    "Lightning's averages": (
        [], lightnings("StochasticWeightAveraging: {swa_lrs: 0.1}", "EMAWeightAveraging: {}"),
        ["StochasticWeightAveraging does not work here: --ema EMA", "EMAWeightAveraging does not work here: --ema EMA"],
    ),
    "Lightning's rate finder": ([], lightnings("LearningRateFinder: {}"), ["LearningRateFinder", "find-lr"]),
    "Lightning's accumulation": (
        [], lightnings("GradientAccumulationScheduler: {scheduling: {0: 2}}"),
        ["GradientAccumulationScheduler", "--batch_ramp BatchRamp"],
    ),
    "a GPU where there is none": (["--trainer.accelerator", "gpu"], "", ["trainer.accelerator is gpu", "0 GPUs"]),
    "init_args of a callback as a number": (
        [], "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelSummary, init_args: 5}]}",
        ["trainer.callbacks is [{", "it must be of type list[Callback]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 5 == 0 else pytest.mark.slow) for i, name in enumerate(MISTAKES)]
)
def test_a_mistake_is_one_sentence_and_exit_code_2_and_touches_nothing(folder, no_gpu, capsys, name):
    flags, overlay, expected = MISTAKES[name]
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("x\n" * 6)
    (folder / "bad.bin").write_bytes(b"\x07" * 4096)
    (folder / "overlay.yaml").write_text(overlay or "{seed_everything: 1}")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "overlay.yaml", *flags)
    assert code == 2
    lines = err.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines, err
    assert len(lines) <= 2 and len(err) < 600, err
    assert "Traceback" not in err and "must be text" not in err
    for part in expected:
        assert part in err, (part, err)
    assert not list(folder.glob("runs/*"))


def test_a_short_name_is_ours_or_torchs_whatever_else_is_imported(folder, capsys):
    class Adafactor(torch.optim.SGD):  # as transformers has one
        pass

    code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--optimizer", Adafactor.__name__, "--print_config")
    assert code == 0 and "class_path: torch.optim.Adafactor" in out


def test_several_mistakes_are_reported_together(folder, capsys):
    (folder / "overlay.yaml").write_text("model: {n_layr: 2, dropout: much}\nchekpoint: {every_n_steps: 2}\n")
    code, _, err = run(
        capsys, "fit", "--config", "tiny.yaml", "--config", "overlay.yaml", "--model.n_head", "3",
        "--data.global_batch_size", "7", "--trainer.devices", "2", "--data.paths", "nowhere.txt", "--loss.z_loss", "-1",
    )  # fmt: skip
    assert code == 2
    for part in ("n_layr", "'much'", "checkpoint.every_n_steps", "n_head=3", "global_batch_size 7", "nowhere.txt", "z_loss"):
        assert part in err, (part, err)


def test_other_commands_explain_mistakes_too(folder, capsys):
    for arguments, part in (
        (["generate", "--run", "runs/none"], "there is no run folder runs/none"),
        (["validate", "--run", "runs/none"], "not a run folder"),
        (["validate", "--config", "tiny.yaml"], "no run folder"),
        (["prepare", "--config", "tiny.yaml"], "--out"),
        (["trian"], "unknown command"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and part in err and "Traceback" not in err, err


def test_help_is_light():
    code = "import sys; from lit_llm.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_arguments_after_an_appended_callback_belong_to_it(folder, capsys):
    first = ("--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss")
    second = ("--trainer.callbacks+", "LearningRateMonitor", "--trainer.callbacks.logging_interval", "step")
    code, out, err = run(capsys, "recipes", "show", "tiny.yaml", *first, *second)
    assert code == 0, err
    stopping, rates = yaml.safe_load(out)["trainer"]["callbacks"]
    assert stopping["class_path"].endswith(".EarlyStopping") and stopping["init_args"]["monitor"] == "val/loss"
    assert rates["class_path"].endswith(".LearningRateMonitor") and rates["init_args"]["logging_interval"] == "step"


def test_of_a_foreign_class_what_was_given_is_recorded(folder, capsys):
    """Lightning's Timer has a default that YAML cannot write; W&B's logger takes those of a package that may be missing."""
    timer = "[{class_path: lightning.pytorch.callbacks.Timer, init_args: {duration: '00:01:00:00'}}]"
    board = "{class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: p}}"
    flags = ["--trainer.callbacks", timer, "--trainer.logger", board, "--trainer.logger.offline", "true"]
    code, out, err = run(capsys, "recipes", "show", "tiny.yaml", *flags)
    assert code == 0, err
    trainer = yaml.safe_load(out)["trainer"]
    assert trainer["callbacks"][0]["init_args"] == {"duration": "00:01:00:00"}
    assert trainer["logger"]["init_args"] == {"project": "p", "offline": True}


@pytest.mark.parametrize(
    ("flags", "limits", "noted"),
    [
        (["--trainer.max_epochs", "3"], (-1, 3), True),
        (["--trainer.max_epochs", "3", "--trainer.max_steps", "5"], (5, 3), False),
        (["--trainer.max_epochs", "-1"], (40, -1), False),
        (["--config", "epochs.yaml"], (-1, 2), True),
        (["--config", "epochs.yaml", "--trainer.max_steps", "7"], (7, -1), True),
    ],
)
def test_of_the_limits_of_a_run_those_of_the_last_source_count(folder, capsys, flags, limits, noted):
    Path("epochs.yaml").write_text("trainer: {max_epochs: 2}")
    Path("steps.yaml").write_text("trainer: {max_steps: 40}")
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "steps.yaml", *flags, "--print_config")
    trainer = yaml.safe_load(out)["trainer"]
    assert code == 0 and (trainer["max_steps"], trainer["max_epochs"]) == limits
    assert ("is replaced by trainer.max_" in err) == noted


def test_mistakes_about_folders_and_strategies_are_one_sentence(folder, capsys):
    Path("runs/broken").mkdir(parents=True)
    Path("runs/broken/config.yaml").write_text("a: [")
    Path("number.yaml").write_text("init_from: 3")
    Path("occupied").write_text("")
    for flags, part in (
        (["--run_dir", "occupied/run"], "occupied/run cannot be created"),
        (["--run_dir", "runs/broken", "--resume", "auto"], "runs/broken/config.yaml is not valid YAML"),
        (["--config", "number.yaml"], "init_from is 3, but must be the path of a run folder"),
        (["--trainer.strategy", "ddp_spawn"], "trainer.strategy is ddp_spawn, but its way to start processes"),
    ):
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
        assert code == 2 and part in err and err.count("error: ") == 1, err


def test_a_setting_written_in_two_ways_in_one_file_is_refused(folder, capsys):
    Path("twice.yaml").write_text("model: {n_layer: 1}\nmodel.n_layer: 2\n")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "twice.yaml")
    said = "error: twice.yaml sets model.n_layer twice, in two ways of writing it: keep one (--config)\n"
    assert (code, err) == (2, said)
