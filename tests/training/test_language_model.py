"""LanguageModel: what it logs and what gradient it makes, against sums done by hand."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lit_llm.callbacks import GradientNorm, SpikeGuard
from lit_llm.core.errors import UserError
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.saved_state import keep_configured_options

SGD = partial(torch.optim.SGD, lr=0.5)
VOCABULARY, LENGTH = 23, 8


def config(**changes):
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": LENGTH, "zero_init_projections": False} | changes
    return GPTConfig(**settings)


class Rows(LightningDataModule):
    """Fixed rows in a fixed order; some targets ignored, unevenly, when asked."""

    vocab_size, eos_id, tokenizer, token_bytes = VOCABULARY, 0, None, torch.arange(VOCABULARY)

    def __init__(self, batch_size, rows=16, ignored=False):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=g)
        targets = ids[:, 1:].clone()
        if ignored:
            for i in range(rows):
                targets[i, : i % LENGTH] = -100
            targets[3] = -100  # a row, and with batch_size 1 a micro-batch, without any target
        self.rows = [{"input_ids": ids[i, :-1], "targets": targets[i]} for i in range(rows)]
        self.batch_size = batch_size
        self.every_target_counts = not ignored

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


class Losses(Callback):
    """What was logged, by optimizer step."""

    def __init__(self):
        self.train = {}

    def on_train_batch_end(self, trainer, *_):
        if "train/loss" in trainer.callback_metrics:  # not within a window, nor after a step without targets
            self.train[trainer.global_step] = float(trainer.callback_metrics.pop("train/loss"))


def fit(data, *, accumulate=1, steps=2, model=None, more=(), precision=None, **kwargs):
    seed_everything(7)
    module = LanguageModel(model or config(), SGD, **kwargs)
    rows = Losses()
    trainer = Trainer(max_steps=steps, accumulate_grad_batches=accumulate, log_every_n_steps=1, callbacks=[*more, rows],
                      precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0)  # fmt: skip
    trainer.fit(module, datamodule=data)
    return module, rows.train


def reference(data, *batches):
    """Plain torch: mean over all counted targets of each global batch, of so many rows."""
    seed_everything(7)
    module = LanguageModel(config(vocab_size=VOCABULARY), SGD)
    module.configure_model()
    model = module.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = {}
    for step, batch in enumerate(batches):
        rows = data.rows[sum(batches[:step]) :][:batch]
        ids, targets = (torch.stack([r[k] for r in rows]) for k in ("input_ids", "targets"))
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step + 1] = loss.item()
    return model, losses


@pytest.mark.parametrize("ignored", [False, True], ids=["every target counts", "some ignored"])
@pytest.mark.parametrize("micro", [1, 2, 8])
def test_the_update_is_that_of_the_mean_over_all_tokens_of_the_global_batch(micro, ignored):
    data = Rows(micro, ignored=ignored)
    module, losses = fit(data, accumulate=8 // micro)
    model, expected = reference(data, 8, 8)
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, a), (_, b) in zip(module.model.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


class Seen(Callback):
    """What callbacks see: the loss of each micro-batch, and of each step its loss, targets and gradient."""

    def __init__(self):
        self.micro_batches, self.steps, self.raw, self.gradients = [], [], [], []

    def on_before_backward(self, trainer, module, loss):
        self.micro_batches.append(loss.item() * trainer.accumulate_grad_batches)  # by which Lightning divides

    def on_after_backward(self, trainer, module):
        self.raw = [p.grad.clone() for p in module.parameters()]

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.steps.append((float(module.step_loss), int(module.step_count)))
        self.gradients = [p.grad.clone() for p in module.parameters()]


def test_an_accumulation_window_that_an_epoch_of_own_data_cuts_short_has_the_gradient_of_its_mean():
    data = Rows(2, rows=12, ignored=True)  # 4 micro-batches, then 2
    norms = GradientNorm(clip=1e9)
    module, losses = fit(data, accumulate=4, more=[norms])
    model, expected = reference(data, 8, 4)
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, a), (_, b) in zip(module.model.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    last = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(norms.latest_norm) == pytest.approx(float(last), rel=1e-4)


class FewTargets(Rows):
    """Batches of 2 rows: none of the first `empty` has a target, then 2 or 3 targets each, but all 16 in every tenth."""

    def __init__(self, steps, empty=()):
        super().__init__(2, rows=2 * steps)
        self.every_target_counts = False
        for step in range(1, steps + 1):
            for i in (0, 1):
                kept = 0 if step in empty else LENGTH if step % 10 == 0 else 1 + i * step % 2
                self.rows[2 * step - 2 + i]["targets"][kept:] = -100


def test_a_batch_with_more_targets_is_no_spike_and_one_without_any_is_no_observation():
    data, guard = FewTargets(40, empty=(*range(1, 9), 25, 40)), SpikeGuard(window=30, min_steps=12, max_consecutive=3)
    module, losses = fit(data, steps=40, more=[guard])
    assert guard.diagnosis is None and guard.state_dict()["skipped"] == 0
    assert guard.state_dict()["losses"] == pytest.approx(list(losses.values())[-30:], rel=1e-6)
    assert len(losses) == 30 and not {8, 25, 40} & set(losses)  # of these steps there is no row
    assert int(module.step_count) == 0 and math.isnan(module.step_loss)


def test_in_bf16_the_factor_of_the_token_count_is_not_rounded():
    seen = Seen()
    fit(Rows(8, ignored=True), steps=1, more=[seen], precision="bf16-true")
    factor = LENGTH / seen.steps[0][1]
    assert float(torch.tensor(factor).bfloat16()) != factor
    for before, after in zip(seen.raw, seen.gradients, strict=True):
        assert before.any() and torch.equal(after, (before.double() * factor).bfloat16())


def test_z_loss_changes_the_update_but_not_what_is_logged_first():
    _, plain = fit(Rows(4))
    _, with_z = fit(Rows(4), loss=LossConfig(z_loss=0.1))
    assert with_z[1] == pytest.approx(plain[1], rel=1e-6)
    assert with_z[2] != pytest.approx(plain[2], rel=1e-4)


def test_validation_sums_over_tokens_not_batches():
    data = Rows(3, rows=10, ignored=True)  # uneven last batch, uneven counts
    module, _ = fit(data, steps=1)
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    ids, targets = (torch.stack([r[k] for r in data.rows]) for k in ("input_ids", "targets"))
    with torch.no_grad():
        nll = F.cross_entropy(module.model.eval()(ids).double().flatten(0, 1), targets.flatten(), reduction="sum")
    counted = targets[targets != -100]
    assert metrics["val/loss"] == pytest.approx(float(nll) / len(counted), rel=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(float(nll) / len(counted)), rel=1e-6)
    # token_bytes is arange: id i stands for i bytes
    assert metrics["val/bits_per_byte"] == pytest.approx(float(nll) / math.log(2) / int(counted.sum()), rel=1e-6)


@pytest.mark.parametrize("names", [None, ("a", "b")], ids=["list", "dict"])
def test_several_validation_loaders_have_one_mean_over_all_their_tokens(names):
    class Parts(Rows):
        def val_dataloader(self):
            loaders = [DataLoader(self.rows[:3], batch_size=2), DataLoader(self.rows[3:], batch_size=4)]
            return loaders if names is None else dict(zip(names, loaders, strict=True))

    module, _ = fit(data := Parts(4, rows=10, ignored=True), steps=1)
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer.validate(module, datamodule=data, verbose=False)
    ids, targets = (torch.stack([r[k] for r in data.rows]) for k in ("input_ids", "targets"))
    with torch.no_grad():
        expected = F.cross_entropy(module.model.eval()(ids).double().flatten(0, 1), targets.flatten())
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(expected), rel=1e-6)


def test_a_vocabulary_smaller_than_the_datas_is_refused():
    with pytest.raises(ValueError, match=r"23 ids.*vocab_size is 20.*--model.vocab_size"):
        fit(Rows(4), model=config(vocab_size=20))


@pytest.mark.parametrize(("size", "warned"), [(2 * VOCABULARY + 257, True), (2 * VOCABULARY + 256, False)])
def test_a_vocabulary_much_larger_than_the_datas_is_named(size, warned):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module, _ = fit(Rows(4), steps=1, model=config(vocab_size=size))
    found = [str(each.message) for each in said if "are never used" in str(each.message)]
    assert len(found) == warned and module.model.config.vocab_size == size
    assert not warned or found[0].startswith(
        f"The model has {size} embeddings, but the data's tokenizer only {VOCABULARY} ids."
    )


def test_the_callers_configuration_stays_as_it_is():
    given = config()
    module, _ = fit(Rows(4), steps=1, model=given)
    assert given.vocab_size is None and module.config.vocab_size == VOCABULARY and module.model.config is module.config


def test_a_model_whose_weights_could_not_be_loaded_is_not_kept(tmp_path):
    """A second attempt in the same process, as in a notebook, must not train random weights."""
    module = LanguageModel(config(vocab_size=VOCABULARY), SGD, init_from=tmp_path / "none.ckpt")
    for _ in range(2):
        with pytest.raises(Exception, match=r"none\.ckpt"):
            module.configure_model()
    assert module.model is None


def test_flops_are_those_of_the_datas_sequences():
    """4 positions instead of 8: 12 · H · h · 4 = 12 · 16 · 4 fewer FLOPs per token in the one block."""
    data, module = Rows(4), LanguageModel(config(), SGD)
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer.validate(module, datamodule=data, verbose=False)
    whole = module.flops_per_token
    data.block_size = LENGTH // 2
    assert whole - module.flops_per_token == 12 * 16 * 4


def test_an_option_that_a_checkpoint_lacks_has_its_configured_value_after_loading():
    """torch replaces groups as a whole, so the next step of the optimizer would not find it."""
    weight = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.SGD([weight], lr=0.5, momentum=0.9).state_dict()
    del saved["param_groups"][0]["nesterov"]
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True)
    optimizer.register_load_state_dict_pre_hook(keep_configured_options)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["nesterov"] is True and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), MuonAdamW])
def test_states_that_lack_a_tensor_are_a_sentence_at_loading(make):
    """Those of a matrix and of a vector may have other names, and one may have none yet."""
    matrices, vectors = ([torch.nn.Parameter(torch.ones(*shape)) for _ in range(2)] for shape in ((3, 2), (2,)))
    unused = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([*matrices, *vectors, unused], lr=0.1)
    for parameter in (*matrices, *vectors):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(keep_configured_options)
    optimizer.load_state_dict(saved)
    saved["state"][1] = {"step": torch.tensor(1.0), "other": torch.ones(1)}
    with pytest.raises(UserError, match=r"is incomplete.*--resume"):
        optimizer.load_state_dict(saved)
