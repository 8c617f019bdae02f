import math
from types import SimpleNamespace

import pytest
import torch
from foreign import Foreign, fit, make_trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn

from lit_llm.callbacks import EMA, GradientNorm, SpikeGuard
from lit_llm.callbacks.errors import UserError


class Fixed(Foreign):
    """Has the given gradients `grads`, times the step's entry of `factors`."""

    def __init__(self, grads, factors=(1.0,), dtype=torch.float32, **kwargs):
        super().__init__(steps=len(factors), **kwargs)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(len(g), dtype=dtype)) for g in grads)
        self.grads, self.factors, self.got = [torch.tensor(g, dtype=dtype) for g in grads], factors, []

    def training_step(self, batch, batch_idx):
        factor = self.factors[self.trainer.global_step]  # Lightning averages the micro-batches
        return sum((w * g * factor).sum() for w, g in zip(self.weights, self.grads, strict=True))

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": [w]} for w in self.weights], lr=1.0)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.got.append([w.grad.tolist() for w in self.weights])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_thirty_forty_with_clip_one_has_norm_fifty_and_becomes_six_and_eight_tenths(tmp_path, accumulate):
    module = Fixed([[30.0], [40.0]])  # in two parameter groups
    _, _, rows = fit([GradientNorm(1.0)], tmp_path, module=module, steps=1, accumulate_grad_batches=accumulate)
    assert rows[1]["grad/norm"] == pytest.approx(50.0)
    assert rows[1]["grad/norm_clipped"] == pytest.approx(50 / (50 + 1e-6))
    assert rows[1]["grad/clip_fraction"] == 1.0
    assert module.got[0] == [pytest.approx([0.6]), pytest.approx([0.8])]


def test_gradients_below_the_limit_are_left_bit_for_bit(tmp_path):
    module = Fixed([[0.3, 0.1], [0.4]])
    _, _, rows = fit([GradientNorm(1.0)], tmp_path, module=module, steps=1)
    norm = math.sqrt(0.09 + 0.01 + 0.16)
    assert module.got[0] == [torch.tensor([0.3, 0.1]).tolist(), torch.tensor([0.4]).tolist()]
    assert rows[1]["grad/norm"] == rows[1]["grad/norm_clipped"] == pytest.approx(norm)
    assert rows[1]["grad/clip_fraction"] == 0.0


def test_the_clip_fraction_is_of_the_steps_since_the_last_row(tmp_path):
    module = Fixed([[1.0]], factors=(9, 9, 0.5, 0.5, 0.5, 9, 0.5, 0.5))
    rows = fit([GradientNorm(1.0)], tmp_path, module=module, steps=8, every=4)[2]
    assert {t: r["grad/clip_fraction"] for t, r in rows.items()} == {1: 1.0, 4: pytest.approx(1 / 3), 8: 0.25}


def test_training_is_bit_identical_to_lightnings_own_clipping(tmp_path):
    ours = fit([GradientNorm(0.05)], tmp_path)[1]
    theirs = fit([], tmp_path, gradient_clip_val=0.05)[1]
    free = fit([], tmp_path)[1]
    assert [loss for _, loss in ours.seen] == [loss for _, loss in theirs.seen] != [loss for _, loss in free.seen]


def test_clip_null_changes_nothing_and_logs_the_norm(tmp_path):
    module = Fixed([[30.0], [40.0]])
    rows = fit([GradientNorm(None)], tmp_path, module=module, steps=1)[2]
    assert rows[1] == {"grad/norm": pytest.approx(50.0)}
    assert module.got[0] == [[30.0], [40.0]]


def test_bfloat16_training_logs_it_too(tmp_path):
    module = Fixed([[1.0] * 2000, [1.0] * 2000], dtype=torch.bfloat16)
    rows = fit([GradientNorm(1.0)], tmp_path, module=module, steps=1)[2]
    assert rows[1]["grad/norm"] == pytest.approx(math.sqrt(4000), rel=1e-6)
    assert module.got[0][0][0] == pytest.approx(1 / math.sqrt(4000), rel=2**-8)


def test_a_module_without_gradients_trains_on(tmp_path):
    class Nothing(Foreign):
        def training_step(self, batch, batch_idx):
            return None  # Lightning skips backward; the hook still runs

    rows = fit([GradientNorm(1.0)], tmp_path, module=Nothing(steps=2), steps=2)[2]
    assert [rows[t]["grad/norm"] for t in (1, 2)] == [0.0, 0.0]


def test_a_gradient_that_is_not_a_number_is_logged_as_such_and_not_counted_as_clipped(tmp_path):
    rows = fit([GradientNorm(1.0)], tmp_path, module=Fixed([[float("nan")]]), steps=1)[2]
    assert math.isnan(rows[1]["grad/norm"])
    assert rows[1]["grad/clip_fraction"] == 0.0


def test_manual_optimization_gets_one_norm_per_optimizer():
    callback = GradientNorm(1.0)

    class Manual(Foreign):
        def __init__(self):
            super().__init__(steps=1)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch) * 1000)
            first.step()
            self.embedding_grad = self.embed.weight.grad.norm().item()
            self.head_grad = torch.cat([p.grad.flatten() for p in self.head.parameters()]).norm().item()
            second.step()
            self.head_after = torch.cat([p.grad.flatten() for p in self.head.parameters()]).norm().item()

        def configure_optimizers(self):
            return torch.optim.SGD(self.embed.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)

    module = Manual()
    make_trainer([callback], "/tmp", steps=1).fit(module)
    assert module.embedding_grad == pytest.approx(1.0, abs=1e-5)
    assert module.head_grad > 1.0  # the first optimizer's step does not change the other's gradients
    assert module.head_after == pytest.approx(1.0, abs=1e-5)


def test_a_resumed_run_continues_the_window(tmp_path):
    def run(steps, resume=None):
        module = Fixed([[1.0]], factors=(9, 9, 0.5, 0.5, 0.5, 9, 0.5, 0.5))
        module.steps = steps
        trainer = make_trainer([GradientNorm(1.0)], tmp_path, steps=steps, every=4)
        trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
        return trainer

    first = run(6)
    assert first.callbacks[0].state_dict() == {"steps": 2, "clipped": 1}
    first.save_checkpoint(tmp_path / "six.ckpt")
    assert run(8, tmp_path / "six.ckpt").logger.rows[8]["grad/clip_fraction"] == 0.25


def test_two_clippers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"remove Trainer\(gradient_clip_val\)"):
        fit([GradientNorm(1.0)], tmp_path, gradient_clip_val=0.5)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
@pytest.mark.parametrize(
    ("callback", "hook"), [(GradientNorm(), "on_train_start"), (SpikeGuard(), "on_train_start"), (EMA(), "setup")]
)
def test_strategies_that_shard_without_dtensor_are_refused_by_name(callback, hook, strategy):
    """Of FSDP1, each rank would clip by the norm of its shard; of DeepSpeed, parameters have no gradient."""
    strategy = object.__new__(strategy)  # DeepSpeed need not be installed
    trainer = SimpleNamespace(strategy=strategy, gradient_clip_val=None, optimizers=[torch.optim.SGD([torch.ones(1)])])
    stage = ["fit"] if hook == "setup" else []
    with pytest.raises(UserError, match=rf"^{type(callback).__name__} .*{type(strategy).__name__}"):
        getattr(callback, hook)(trainer, Foreign(), *stage)
