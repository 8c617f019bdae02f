"""The launch checklist passes on what is right, and each line fails on what it is there for."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lit_llm.__main__ import main
from lit_llm.config.build import ONE_DEVICE, build
from lit_llm.config.parse import parse
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import cross_entropy
from lit_llm.models.self_attention import Attention
from lit_llm.training import checklist as check
from lit_llm.training.checklist import Observer
from lit_llm.training.objective import CrossEntropy
from lit_llm.training.preference import Preference

RECIPE = """
model: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 32}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, micro_batch_size: 4, global_batch_size: 16}
schedule: {class_path: Cosine, init_args: {warmup_steps: 4}}
validation: {every_n_steps: 4}
checkpoint: {every_n_steps: 3}
trainer: {max_steps: 50, accelerator: cpu, log_every_n_steps: 1}
"""
NAMES = [
    "shapes",
    "labels shifted by one",
    "first loss is ln V",
    "every parameter gets a gradient",
    "learning rate as intended",
    "a save and a load",
    "mask",
    "ignored targets",
    "data do not repeat",
    "loader is fast enough",
    "one batch can be overfitted",
    "coordinate check",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "LOADER_SHARE", 1.0)  # a toy trains as fast as it reads
    monkeypatch.setattr(check, "LOADER_BATCHES", 100)
    monkeypatch.setattr(check, "OVERFIT_STEPS", 30)
    monkeypatch.setattr(check, "width_powers", lambda config, make: {"logits": 0.25, "queries": 0.1})  # takes seconds
    lines = "".join(f"line {i} of a text that says {i * i} and {i * 7919 % 10007}\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(lines)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def lines(tmp_path, *flags: str) -> dict[str, check.Line]:
    recipe = parse("fit", ["--config", "tiny.yaml", *flags])
    built = build(recipe, run_dir=tmp_path / "kept", trainer={**ONE_DEVICE, "limit_val_batches": 1})
    checked = check.CheckedRun(built.trainer, built.model, built.datamodule, built.run.run_dir, trained=False)
    checked.cut_batch()
    return {line.name: line for line in check.checklist(checked)}


def failed(found: dict[str, check.Line]) -> set[str]:
    return {name for name, line in found.items() if not line.passed}


def test_a_sound_recipe_passes_every_line_and_leaves_nothing_behind(folder, capsys):
    before = sorted(p.name for p in folder.iterdir())
    code = main(["check", "--config", "tiny.yaml"])
    out = capsys.readouterr().out
    stages = (
        "training 3 steps",
        "mask, targets, loader",
        "one batch: step 1 of at most 30, loss",
        "coordinate check …",
        "launch",
    )
    said = [out.find(text) for text in stages]
    assert said == sorted(said) and said[0] >= 0, "a line where it takes long"
    assert code == 0
    assert [name for name in NAMES if name in out] == NAMES and "FAIL" not in out
    assert "4 sequences instead of 16" in out
    assert out.count("run: ") == 1 and "run: 50 steps = 25,600 tokens = " in out  # 50 x 16 x 32: of the recipe
    assert sorted(p.name for p in folder.iterdir()) == sorted([*before, "cache"])


def test_the_length_of_the_run_is_that_of_the_recipes_batch(folder):
    recipe = parse("fit", ["--config", "tiny.yaml", "--trainer.max_steps", "900", "--trainer.max_epochs", "1"])
    built = build(recipe, run_dir=folder / "kept", trainer=ONE_DEVICE)
    data = built.datamodule
    checked = check.CheckedRun(built.trainer, built.model, data, folder / "kept", trained=False)
    checked.cut_batch()
    data.trainer = built.trainer
    data.setup("fit")
    steps = -(-len(data.train_blocks()) // 16)
    assert data.global_batch_size == 4 and built.trainer.max_steps == steps < 900  # the schedule ends there
    assert checked.run_lines()[0].startswith(f"run: {steps} steps = {steps * 16 * 32:,} tokens")


@pytest.mark.slow
def test_a_large_recipe_cut_by_the_debug_overlay_passes(folder, capsys, monkeypatch):
    monkeypatch.setattr(check, "OVERFIT_STEPS", 200)
    monkeypatch.setattr(check, "LOADER_SHARE", 0.0)
    code = main(["check", "--config", "llama2-7b", "--config", "debug"])
    out = capsys.readouterr().out
    assert code == 0 and "FAIL" not in out, out


def test_a_slow_loader_is_seen_unless_the_model_is_a_toy(folder, monkeypatch):
    monkeypatch.setattr(check, "LOADER_SHARE", 0.0)
    assert "loader is fast enough" not in failed(lines(folder))
    monkeypatch.setattr(check, "TOY_PARAMETERS", 0)
    assert "loader is fast enough" in failed(lines(folder))


def test_a_run_that_leaves_no_batch_is_not_tested_for_its_loader(folder, capsys):
    assert main(["check", "--config", "tiny.yaml", "--trainer.max_steps", "3", "--schedule.warmup_steps", "1"]) in (0, 1)
    assert capsys.readouterr().out.count("no batch is left") == 2


def test_documents_are_kept_apart(folder):
    found = lines(folder, "--model.mask_documents", "true")
    assert not failed(found) and "none after the end of its document" in found["mask"].found


@pytest.mark.parametrize("positions", [1, 2])
def test_sequences_too_short_for_another_document_pass(folder, positions):
    found = lines(folder, "--model.block_size", str(positions), "--model.mask_documents", "true")
    assert found["mask"].passed and found["labels shifted by one"].passed
    assert found["labels shifted by one"].found.startswith("not tested") == (positions == 1)


def test_a_mistake_in_the_recipe_is_fits_message(folder, capsys):
    assert main(["check", "--config", "tiny.yaml", "--model.n_head", "3"]) == 2
    assert "does not divide model.n_embd" in capsys.readouterr().err
    for flags in (["--full_batch", "perhaps"], ["--full-batch=perhaps"]):
        assert main(["check", "--config", "tiny.yaml", *flags]) == 2
        assert "--full_batch is 'perhaps', it must be true or false" in capsys.readouterr().err


def test_a_layout_that_fit_refuses_is_refused_although_the_checks_use_one_device(folder, capsys):
    overlay = ["--config", "strategy/pp", "--trainer.devices", "2", "--data.global_batch_size", "1"]
    assert main(["check", "--config", "tiny.yaml", *overlay]) == 2
    assert "needs at least 2 micro-batches in a step, but it has 1" in capsys.readouterr().err


def test_a_failing_line_makes_the_exit_code_one(folder, capsys):
    assert main(["check", "--config", "tiny.yaml", "--optimizer.lr", "1e-9", "--optimizer.adamw_lr", "1e-9"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "one batch can be overfitted" in out


@pytest.mark.slow
def test_the_coordinate_check_fails_only_if_rates_should_hold_for_every_width(folder, monkeypatch):
    wide = ["--model.base_width", "8"]
    assert "logits with width^+0.25" in lines(folder, *wide)["coordinate check"].found
    monkeypatch.setattr(check, "width_powers", lambda config, make: {"logits": -0.31, "queries": 0.1})
    found = lines(folder, *wide)["coordinate check"]
    assert not found.passed and found.found.endswith("beyond ±0.3")
    found = lines(folder)["coordinate check"]
    assert found.passed and "model.base_width is not set" in found.found


def test_a_leak_from_the_future_is_seen(folder, monkeypatch):
    forward = Attention.forward

    def looks_ahead(self, x, *others):
        return forward(self, x + x.roll(-1, dims=1), *others)

    monkeypatch.setattr(Attention, "forward", looks_ahead)
    found = lines(folder)
    assert "mask" in failed(found) and "depends on the later token at" in found["mask"].found


def test_a_wrong_initialisation_is_seen(folder, monkeypatch):
    right = GPT.init_weights

    def too_large(self):
        right(self)
        with torch.no_grad():
            self.head_weight.mul_(20)

    monkeypatch.setattr(GPT, "init_weights", too_large)
    found = lines(folder)
    assert "first loss is ln V" in failed(found) and "initialisation" in found["first loss is ln V"].found


def test_a_parameter_that_takes_no_part_is_seen(folder, monkeypatch):
    right = GPT.forward

    def detached(self, ids, targets=None, **rest):
        self.norm.weight.requires_grad_(True)
        weight, self.norm.weight = self.norm.weight, torch.nn.Parameter(self.norm.weight.detach().clone())
        try:
            return right(self, ids, targets, **rest)
        finally:
            self.norm.weight = weight

    monkeypatch.setattr(GPT, "forward", detached)
    found = lines(folder)
    assert "every parameter gets a gradient" in failed(found)
    assert "model.norm.weight" in found["every parameter gets a gradient"].found


def test_a_rate_that_is_not_the_schedules_is_seen(folder, monkeypatch):
    from lit_llm.callbacks import Cosine

    right = Cosine.on_train_batch_start

    def too_high(self, trainer, *rest):
        right(self, trainer, *rest)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 2
            self._set_for = 0

    monkeypatch.setattr(Cosine, "on_train_batch_start", too_high)
    found = lines(folder)
    assert "learning rate as intended" in failed(found) and "the schedule has" in found["learning rate as intended"].found


def test_text_that_repeats_is_seen(folder):
    (folder / "text.txt").write_text("".join(f"{i % 8:015d}\n" for i in range(4000)))
    found = lines(folder)
    assert "data do not repeat" in failed(found)


def test_a_checkpoint_that_is_not_what_was_trained_is_seen(folder, monkeypatch):
    right = check.read

    def changed(path, **rest):
        saved = right(path, **rest)
        name = next(iter(saved["state_dict"]))
        saved["state_dict"][name] = saved["state_dict"][name] + 1
        return saved

    monkeypatch.setattr(check, "read", changed)
    assert "a save and a load" in failed(lines(folder))


def test_a_changed_optimizer_state_in_a_checkpoint_is_seen(folder, monkeypatch):
    right = check.read

    def changed(path, **rest):
        saved = right(path, **rest)
        state = next(iter(saved["optimizer_states"][0]["state"].values()))
        name = next(iter(state))
        state[name] = state[name] + 1
        return saved

    monkeypatch.setattr(check, "read", changed)
    found = lines(folder)
    assert "a save and a load" in failed(found) and "optimizer state" in found["a save and a load"].found


def observed(ids, targets) -> Observer:
    observer = Observer()
    observer.batches = [{"input_ids": ids, "targets": targets}]
    return observer


def test_labels_that_are_copies_or_shifted_by_two_are_seen():
    ids = torch.arange(20).reshape(2, 10)
    assert check.shifted_labels(observed(ids, ids + 1)).passed
    assert not check.shifted_labels(observed(ids, ids)).passed
    assert not check.shifted_labels(observed(ids, ids + 2)).passed
    assert not check.shifted_labels(observed(ids, torch.full_like(ids, -100))).passed  # nothing to learn
    packed, documents = ids.roll(5, dims=1), torch.tensor([[0] * 5 + [1] * 5] * 2)
    found = observed(packed, packed + 1)  # two documents in a row, in another order
    assert not check.shifted_labels(found).passed
    assert check.shifted_labels(found, documents).passed
    found.batches[0]["targets"][:, 7] += 1
    assert not check.shifted_labels(found, documents).passed
    answers = torch.full_like(ids, -100)
    answers[:, 4] = 99  # one token each
    assert "not tested" in check.shifted_labels(observed(packed, answers), documents).found
    assert not check.shifted_labels(observed(packed, answers)).passed


@pytest.mark.slow
def test_packed_documents_pass_with_and_without_masks(folder):
    (folder / "text.jsonl").write_text("".join(f'{{"text": "line {i} says {i * 7919 % 10007}"}}\n' for i in range(3000)))
    packed = ["--data.paths", "text.jsonl", "--data.packing", "best_fit", "--data.micro_batch_size", "2"]
    for masks in ("true", "false"):
        assert not failed(lines(folder, *packed, "--model.mask_documents", masks)), masks


def test_shapes_types_and_ids_are_looked_at():
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=30))
    ids = torch.arange(20).reshape(2, 10)
    see = partial(check.shapes, model=model)
    assert see(observed(ids, ids)).passed
    assert not see(observed(ids.int(), ids)).passed
    assert not see(observed(ids, ids[:, 1:])).passed
    assert not see(observed(ids + 11, ids)).passed  # id 30
    assert not see(observed(ids.repeat(1, 2), ids.repeat(1, 2))).passed  # 20 positions of 16


def test_the_first_loss_may_be_five_percent_off():
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=30))
    for factor, passes in ((1.04, True), (0.96, True), (1.06, False), (0.9, False)):
        observer = Observer()
        observer.losses = [math.log(30) * factor]
        assert check.first_loss(observer, model).passed is passes
    untested = check.first_loss(Observer(), model)  # no step had a target
    assert untested.passed and untested.found.startswith("not tested")


def test_what_is_true_of_tokens_is_not_asked_of_pairs():
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=30))
    observer = Observer()
    observer.losses = [math.log(2)]  # of DPO: the model is its own reference
    run = SimpleNamespace(model=SimpleNamespace(objective=Preference(), lora=None), trainer=None, observer=observer)
    for line in (check.first_loss(observer, model, of_tokens=False), check.overfitting(run)):
        assert line.passed and line.found.startswith("not tested")


@pytest.mark.parametrize("trained", [True, False])
def test_trained_weights_are_overfitted_as_they_are(trained):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=30))
    with torch.no_grad():
        model.head.weight.normal_(std=2.0)
    ids = torch.arange(32).view(2, 16) % 30
    targets = (ids + 1) % 30
    module = SimpleNamespace(
        objective=CrossEntropy(),
        lora=None,
        model=model,
        optimizer_factory=partial(torch.optim.AdamW, lr=1e-2),
        sums_of=lambda batch, objective: model(batch["input_ids"], batch["targets"], loss=cross_entropy),
    )
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).item()
    seen = observed(ids, targets)
    seen.losses = [expected]
    run = SimpleNamespace(
        model=module,
        trainer=trainer,
        trained=trained,
        observer=seen,
        precision=nullcontext,
        say=lambda _: None,
    )
    line = check.overfitting(run)
    assert line.found.startswith(f"loss {expected:.2f} to ") is trained
    assert line.passed
