"""EMA: the average follows its formula, is saved and resumed, and leaves training alone."""

import pytest
import torch
from foreign import VOCAB, Batches, Foreign, assert_same, fit
from lightning.pytorch.callbacks import Callback

from lit_llm.callbacks import EMA, StepCheckpoint, ValidateEvery
from lit_llm.callbacks._lightning import ValidationInterrupted, interruptible_validation
from lit_llm.callbacks.ema import AVERAGE

VAL = {"limit_val_batches": 1.0}


class Visited(Callback):
    """The weights before the first step and after each one, in float64."""

    def __init__(self):
        self.weights = []

    def on_train_start(self, trainer, pl_module):
        self.note(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == len(self.weights):
            self.note(pl_module)

    def note(self, module):
        self.weights.append({name: p.detach().double().clone() for name, p in module.named_parameters()})


def averaged(weights, *, decay, every=1, start=0, warmup=True):
    """The formula in float64."""
    average, n = weights[start], 0
    for step in range(start + 1, len(weights)):
        if step % every == 0:
            keep = min(decay, (1 + n) / (10 + n)) if warmup else decay
            average = {name: keep * value + (1 - keep) * weights[step][name] for name, value in average.items()}
            n += 1
    return average


def saved(trainer):
    return torch.load(trainer.checkpoint_callback.last_model_path, weights_only=True)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"decay": 0.9, "warmup": False}, {}),
        ({"decay": 0.3}, {}),  # 4/13 > 0.3: the warm-up ends in between
        ({"decay": 0.999, "every_n_steps": 3, "start_step": 4}, {"every": 3, "start": 4}),
        ({"decay": 0.5, "start_step": 8}, {"start": 8}),
    ],
)
def test_the_average_is_the_recursion_in_float64(tmp_path, options, settings):
    visited = Visited()
    trainer, *_ = fit([visited, EMA(**options), StepCheckpoint(8, monitor=None)], tmp_path, accumulate_grad_batches=2)
    expected = averaged(visited.weights, decay=options["decay"], warmup=options.get("warmup", True), **settings)
    found = saved(trainer)[AVERAGE]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_bf16_model_has_an_average_in_fp32(tmp_path):
    visited = Visited()
    module = Foreign().to(torch.bfloat16)
    callbacks = [visited, EMA(0.99), ValidateEvery(3), StepCheckpoint(8, monitor=None)]
    trainer, *_ = fit(callbacks, tmp_path, module=module, **VAL)
    for name, value in saved(trainer)[AVERAGE].items():
        torch.testing.assert_close(value.double(), averaged(visited.weights, decay=0.99)[name], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p.double(), visited.weights[-1][name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_with_it_and_validation_measures_the_average(tmp_path, dtype):
    val = Batches(2)

    def run(*callbacks):
        module = Foreign().to(dtype)
        return fit([*callbacks, ValidateEvery(4)], tmp_path, module=module, **VAL)

    def loss(weights):
        module = Foreign().to(dtype)
        module.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
        return sum(module.loss(val[i]).item() for i in range(2)) / 2

    visited = Visited()
    (without, plain, _), (with_it, module, _) = run(visited), run(EMA(0.5))
    assert module.seen == plain.seen
    assert_same(dict(module.named_parameters()), dict(plain.named_parameters()))
    measured, average = float(with_it.callback_metrics["val/loss"]), averaged(visited.weights, decay=0.5)
    assert measured == pytest.approx(loss(average), rel=1e-6 if dtype == torch.float32 else 1e-3)
    of_weights = run(EMA(0.5, validate=False))[0].callback_metrics["val/loss"]
    assert of_weights == without.callback_metrics["val/loss"] != pytest.approx(measured, rel=1e-2)


def test_a_validation_after_training_measures_the_average_too_even_if_there_was_no_step_to_make(tmp_path):
    def run(resume=None):
        callbacks = [EMA(0.9), StepCheckpoint(8, monitor=None)]
        return fit(callbacks, tmp_path, module=Foreign(seed=0 if resume is None else 9), resume=resume, **VAL)[:2]

    def measured(trainer, module, **kwargs):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        value = trainer.validate(module, verbose=False, **kwargs)[0]["val/loss"]
        assert_same(dict(module.named_parameters()), before)
        return value

    def loss(weights):
        module = Foreign()
        module.load_state_dict(weights)
        return pytest.approx(sum(module.loss(Batches(2)[i]).item() for i in range(2)) / 2, rel=1e-6)

    trainer, module = run()
    checkpoint, last = saved(trainer), trainer.checkpoint_callback.last_model_path
    of_average, of_weights = loss(checkpoint[AVERAGE]), loss(checkpoint["state_dict"])
    assert of_average != of_weights
    assert measured(trainer, module) == of_average
    again, resumed = run(last)
    assert again.global_step == 8 and resumed.seen == []
    assert measured(again, resumed) == of_average
    assert measured(again, resumed, ckpt_path=last, weights_only=True) == of_weights
    other = Foreign(seed=3)
    assert measured(again, other) == loss(other.state_dict())


def test_a_resumed_run_has_the_same_average_bit_for_bit(tmp_path):
    def run(folder, steps, resume=None):
        callbacks = [EMA(0.9), ValidateEvery(2), StepCheckpoint(2)]
        return fit(callbacks, tmp_path / folder, module=Foreign(steps=8), steps=steps, resume=resume, **VAL)[0]

    straight, first = saved(run("straight", 8)), run("first", 4)
    resumed = saved(run("second", 8, first.checkpoint_callback.last_model_path))
    for key in ("state_dict", "optimizer_states", AVERAGE):
        assert_same(resumed[key], straight[key])
    assert resumed["callbacks"]["EMA"] == straight["callbacks"]["EMA"] == {"updates": 8}


def test_a_checkpoint_without_an_average_begins_one_and_says_so(tmp_path, caplog, capsys):
    first = fit([StepCheckpoint(4, monitor=None)], tmp_path / "first", module=Foreign(steps=8), steps=4)[0]
    visited = Visited()
    visited.weights = [None] * 4
    path = first.checkpoint_callback.last_model_path
    with caplog.at_level("INFO"):
        trainer, *_ = fit(
            [visited, EMA(0.9), StepCheckpoint(8, monitor=None)], tmp_path / "second", resume=path, module=Foreign(steps=8)
        )
    assert "EMA: the checkpoint has no average. It begins with the weights of step 4." in caplog.text + capsys.readouterr().err
    expected = averaged(visited.weights[4:], decay=0.9)
    for name, value in saved(trainer)[AVERAGE].items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_frozen_parameters_have_none_and_tied_ones_have_one_under_both_names(tmp_path):
    class Tied(Foreign):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(8, VOCAB)
            self.head.weight = self.embed.weight
            self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    trainer, *_ = fit([EMA(), StepCheckpoint(8, monitor=None)], tmp_path, module=Tied())
    average = saved(trainer)[AVERAGE]
    assert average.keys() == {"embed.weight", "head.weight", "head.bias"}
    assert average["embed.weight"].data_ptr() == average["head.weight"].data_ptr()


def test_parameters_that_are_unfrozen_while_training_are_averaged_from_then_on(tmp_path):
    """The embedding is unfrozen after step 4, as by BaseFinetuning, and changed by step 5 for the first time."""

    class Unfreezes(Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            pl_module.embed.requires_grad_(trainer.global_step >= 4)

    class Frozen(Foreign):
        def __init__(self):
            super().__init__()
            self.embed.requires_grad_(False)

    visited = Visited()
    callbacks = [Unfreezes(), visited, EMA(0.5, warmup=False), ValidateEvery(4), StepCheckpoint(8, monitor=None)]
    trainer, *_ = fit(callbacks, tmp_path, module=Frozen(), **VAL)
    expected = averaged(visited.weights, decay=0.5, warmup=False)
    expected["embed.weight"] = averaged(visited.weights, decay=0.5, start=5, warmup=False)["embed.weight"]
    found = saved(trainer)[AVERAGE]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_weights_are_back_after_a_validation_that_fails_and_in_a_checkpoint_saved_within_one(tmp_path):
    class Fails(Foreign):
        def validation_step(self, batch, batch_idx):
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            else:
                raise RuntimeError("broken")

    visited, module = Visited(), Fails()
    with pytest.raises(RuntimeError, match="broken"):
        fit([visited, EMA(0.9), ValidateEvery(2)], tmp_path, module=module, **VAL)
    within = torch.load(tmp_path / "within.ckpt", weights_only=True)
    for name, p in module.named_parameters():
        assert torch.equal(p.double(), visited.weights[4][name])
        assert torch.equal(within["state_dict"][name].double(), visited.weights[2][name])


def test_weights_are_back_before_an_interrupted_validation_is_saved(tmp_path):
    class Interrupts(Callback):
        def on_fit_start(self, trainer, pl_module):
            self.undo = interruptible_validation(trainer)

        def on_validation_batch_start(self, trainer, *args):
            if trainer.global_step == 4:
                raise ValidationInterrupted

    visited = Visited()
    callbacks = [visited, StepCheckpoint(3, monitor=None, keep_last=9), EMA(0.9), ValidateEvery(4), Interrupts()]
    module = fit(callbacks, tmp_path, **VAL)[1]
    content = torch.load(tmp_path / "checkpoints" / "step-00000004.ckpt", weights_only=True)
    average = averaged(visited.weights[:5], decay=0.9)
    for name, weights in visited.weights[4].items():
        assert torch.equal(content["state_dict"][name].double(), weights)
        torch.testing.assert_close(content[AVERAGE][name].double(), average[name], rtol=1e-5, atol=1e-6)
    assert module.seen == fit([ValidateEvery(4)], tmp_path)[1].seen
