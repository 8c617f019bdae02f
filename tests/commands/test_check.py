"""The launch checklist passes on what is right, and each line fails on what it is there for."""

import ast
import math
import random
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lit_llm.__main__ import main
from lit_llm.config.build import ONE_DEVICE, build
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide
from lit_llm.data import ShardWriter
from lit_llm.models import gpt
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.latent_config import LatentConfig
from lit_llm.models.loss import cross_entropy
from lit_llm.models.short_convolution import ShortConvolution
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
    "labels shifted by one",
    "first loss is ln V",
    "every parameter gets a gradient",
    "a save and a load",
    "mask",
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
    built = build(decide(recipe, run_dir=tmp_path / "kept"), trainer={**ONE_DEVICE, "limit_val_batches": 1})
    checked = check.CheckedRun(built.trainer, built.model, built.datamodule, built.spec.run_dir, trained=False)
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
        "mask, files, loader",
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


def test_without_a_target_one_line_says_so(folder, capsys):
    for name in ("train", "val"):
        with ShardWriter(folder, name, vocab_size=64, shard_tokens=10_000, masked=True) as writer:
            for _ in range(40):
                writer.write(np.arange(40), np.zeros(40, np.uint8))
                writer.end_document()
    files = ["--data.train", "train_*.bin", "--data.val", "val_*.bin", "--data.vocab_size", "64"]
    found = lines(folder, "--data", "TokenShards", *files, "--data.packing", "best_fit", "--trainer.max_steps", "10")
    assert [name for name in NAMES if name not in found] == ["labels shifted by one", "every parameter gets a gradient"]
    line = found["labels and gradients"]
    said = "40 of 40 training conversations are longer than data.block_size 32 and are cut"
    assert not line.passed and line.found.startswith(f"no target in these 3 steps: {said}")
    assert f"note: {said}" in capsys.readouterr().err


def test_the_length_of_the_run_is_that_of_the_recipes_batch(folder):
    recipe = parse("fit", ["--config", "tiny.yaml", "--trainer.max_steps", "900", "--trainer.max_epochs", "1"])
    built = build(decide(recipe, run_dir=folder / "kept"), trainer=ONE_DEVICE)
    data = built.datamodule
    checked = check.CheckedRun(built.trainer, built.model, data, folder / "kept", trained=False)
    checked.cut_batch()
    data.trainer = built.trainer
    data.setup("fit")
    steps = -(-len(data.blocks("train")) // 16)
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


def test_text_that_repeats_is_seen(folder):
    (folder / "text.txt").write_text("".join(f"{i % 8:015d}\n" for i in range(4000)))
    found = lines(folder)
    assert "data do not repeat" in failed(found)


def test_documents_are_kept_apart(folder):
    found = lines(folder, "--model.mask_documents", "true")
    assert not failed(found) and "nor on another document" in found["mask"].found


def test_a_mistake_in_the_recipe_is_fits_message(folder, capsys):
    assert main(["check", "--config", "tiny.yaml", "--model.n_head", "3"]) == 2
    assert "does not divide model.n_embd" in capsys.readouterr().err
    for flags in (["--full_batch", "perhaps"], ["--full-batch=perhaps"]):
        assert main(["check", "--config", "tiny.yaml", *flags]) == 2
        assert "--full_batch is 'perhaps', it must be true or false" in capsys.readouterr().err


class First(Callback):
    """Keeps the micro-batches of the first step, after which training ends."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 0:
            self.batches.append(batch["input_ids"])

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 1


def test_the_batch_that_is_shown_is_the_one_that_fit_reads(folder, capsys):
    spec = decide(parse("fit", ["--config", "tiny.yaml"]), run_dir=folder / "kept")
    first, built = First(), build(spec, trainer={"logger": False})
    built.trainer.callbacks.append(first)
    built.trainer.fit(built.model, datamodule=built.datamodule)
    read = torch.cat(first.batches)
    assert read.shape == (16, 32)  # the whole batch, of which the checks use four sequences
    capsys.readouterr()
    assert main(["check", "--config", "tiny.yaml", "--show", "9"]) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"    inputs   (.*)\n    targets  (.*)\n", out)
    assert [list(ast.literal_eval(inputs).encode()) for inputs, _ in shown] == read[:9].tolist()
    assert all(ast.literal_eval(inputs)[1:] == ast.literal_eval(targets)[:-1] for inputs, targets in shown)
    assert out.index("targets  ") < out.index("training 3 steps")
    assert main(["check", "--config", "tiny.yaml", "--show", "0"]) == 2 and "show" in capsys.readouterr().err


OWN = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class Counting(LightningDataModule):
    vocab_size = 40

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(9) + i, "targets": torch.arange(1, 10) + i} for i in range(31)]
        rows[0]["targets"][:4] = -100
        return DataLoader(rows, batch_size=2)

    val_dataloader = train_dataloader
"""


def test_of_a_data_module_of_ones_own_the_first_micro_batch_is_shown(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "counting.py").write_text(OWN)
    data = "model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 9}\ndata: {class_path: counting.Counting}\n"
    (folder / "own.yaml").write_text(data + "schedule: Constant\ntrainer: {max_steps: 5, accelerator: cpu}\n")
    main(["check", "--config", "own.yaml", "--show", "1"])
    out = capsys.readouterr().out
    assert "    inputs   0 1 2 3 4 5 6 7 8\n    targets  [4 masked] 5 6 7 8 9\n" in out and "sequence 2" not in out


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


class Attends(torch.nn.Module):
    """A block of attention: (T, T) bool `sees(queries, keys, training)` says what a query attends to, if it is not earlier."""

    def __init__(self, vocab_size=31, sees=lambda q, k, training: q < 0, more=None, width=16):
        super().__init__()
        self.config = GPTConfig(vocab_size=vocab_size)
        self.embedding, self.places = torch.nn.Embedding(vocab_size, width), torch.nn.Embedding(300, width)
        self.qkv, self.head = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, vocab_size)
        self.sees, self.more = sees, more

    def forward(self, ids):
        at = torch.arange(ids.size(1))
        x = self.embedding(ids) + self.places(at)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = (at <= at[:, None]) | self.sees(at[:, None], at, self.training)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x if self.more is None else self.more(x, self.training))


def mask_line(model, ids, *, float8=False) -> check.Line:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", global_step=3, world_size=1, global_rank=0)
    module = SimpleNamespace(model=model, whole_model=model, compute_config=SimpleNamespace(float8=float8))
    observer = SimpleNamespace(batches=[{"input_ids": ids}])
    return check.causal_mask(SimpleNamespace(model=module, trainer=trainer, precision=nullcontext, observer=observer))


LEAKS = {
    "all tokens": lambda q, k, training: q >= 0,
    "the last token": lambda q, k, training: k == k.max(),
    "the next token": lambda q, k, training: k == q + 1,
    "the token 20 ahead": lambda q, k, training: k == q + 20,
    "the first quarter, from within it": lambda q, k, training: (q < k.max() // 4) & (k < k.max() // 4),
    "the first quarter": lambda q, k, training: k < k.max() // 4,
    "the second half, from within it": lambda q, k, training: (q > k.max() // 2) & (k > k.max() // 2),
    "the next token, at every 7th position": lambda q, k, training: (q % 7 == 0) & (k == q + 1),
    "every 5th token": lambda q, k, training: k % 5 == 4,
    "the next tokens, behind position 64": lambda q, k, training: (q >= 64) & (k <= q + 3),
    "the next token, in training": lambda q, k, training: (k == q + 1) & training,
    "the last token, in training": lambda q, k, training: (k == k.max()) & training,
    "the next token, in evaluation": lambda q, k, training: (k == q + 1) & (not training),
}
MIXES = {  # of (1, T, d)
    "a mean": lambda x, training: x + x.mean(dim=1, keepdim=True),
    "a maximum": lambda x, training: x + x.amax(dim=1, keepdim=True),
    "batch statistics in training": lambda x, training: (x - x.mean(dim=1, keepdim=True)) if training else x,
    "weights that sum to 1 over positions": lambda x, training: x + x * x.softmax(dim=1),
    "a convolution": lambda x, training: torch.nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT,
    "tokens that experts choose": lambda x, training: x * (x[..., :1] >= x[..., :1].topk(x.size(1) // 4, dim=1).values.min()),
}


@pytest.mark.parametrize("length", [90, 200])
def test_every_leak_from_the_future_is_seen(length):
    ids = torch.randint(31, (2, length), generator=torch.Generator().manual_seed(length))
    leaky = {name: Attends(sees=sees) for name, sees in LEAKS.items()} | {
        name: Attends(more=more) for name, more in MIXES.items()
    }
    passed = [name for name, model in leaky.items() if mask_line(model, ids).passed]
    assert not passed
    training = [name for name, model in leaky.items() if "in training" in mask_line(model, ids).found]
    assert training == [name for name in leaky if name.endswith("in training")]
    with torch.no_grad():  # a projection that is zero until now hides what is before it
        leaky["all tokens"].head.weight.zero_()
    assert not mask_line(leaky["all tokens"], ids).passed


class Suspicious(torch.nn.Module):
    """What looks at later positions, but tells earlier ones nothing: noise, dropout, counted passes, a capacity in order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x, training):
        self.passes += training
        x = torch.nn.functional.dropout(x, 0.2, training) + 0.1 * torch.randn_like(x) + random.random() + self.passes
        chosen = x[..., 0] > 0
        return x * (chosen & (chosen.cumsum(dim=1) <= x.size(1) // 4))[..., None]


def test_an_honest_model_is_not_accused():
    assert mask_line(Attends(more=Suspicious()), torch.arange(90)[None] % 31).passed
    assert "not tested" in mask_line(Attends(), torch.arange(90)[None] % 31, float8=True).found
    moe = MoEConfig(experts=4, top_k=2, balance=0.1, sequence_balance=0.1)
    all_else = {
        "dropout": 0.2,
        "window": 9,
        "input_convolution": 3,
        "qkv_convolution": 3,
        "predict_ahead": 1,
        "attention_sinks": True,
    }
    for settings in (
        {},
        {"moe": moe},
        {"latent": LatentConfig(), "qk_norm": False},
        {"mask_documents": True, "moe": moe, **all_else},
    ):
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=48, vocab_size=31, eos_id=0, **settings))
        ids = torch.arange(96).view(2, 48) % 31
        line = mask_line(model, ids)
        assert line.passed and ("another document" in line.found) is model.config.mask_documents, line


def test_what_crosses_documents_is_seen(monkeypatch):
    config = GPTConfig(
        n_layer=1, n_head=2, n_embd=16, block_size=48, vocab_size=31, eos_id=0, mask_documents=True, qkv_convolution=3
    )
    model, ids, right = GPT(config), torch.arange(96).view(2, 48) % 31, ShortConvolution.forward
    one_document = partial(gpt.visibilities, documents=None)
    ways = {
        (gpt, "visibilities"): lambda config, ids, documents, *rest, **more: one_document(config, ids, kernel=rest[0], **more),
        (ShortConvolution, "forward"): lambda self, x, places=None, *rest: right(self, x, None, *rest),
    }
    for (where, name), wrong in ways.items():
        with monkeypatch.context() as patch:
            patch.setattr(where, name, wrong)
            line = mask_line(model, ids)
            assert not line.passed and "the document before" in line.found


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


def test_a_checkpoint_that_is_not_what_was_trained_is_seen(folder, monkeypatch):
    right = check.read

    def changed(path, **rest):
        saved = right(path, **rest)
        name = next(iter(saved["state_dict"]))
        saved["state_dict"][name] = saved["state_dict"][name] + 1
        return saved

    monkeypatch.setattr(check, "read", changed)
    assert "a save and a load" in failed(lines(folder))


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
