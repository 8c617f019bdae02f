import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from foreign import Batches, Foreign, fit, make_trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lit_llm.callbacks import WSD, Constant, Cosine, Decay, InverseSquareRoot, Linear, Schedule, StepCheckpoint
from lit_llm.callbacks.learning_rate_schedules import decayed, wsd

cosine, linear = partial(wsd, shape="cosine"), partial(wsd, shape="linear")
LLM = {"peak": 1e-3, "final": 1e-4, "warmup_steps": 1000, "total_steps": 10000}


@pytest.mark.parametrize(
    ("t", "rate"),
    [(500, 5e-4), (1000, 1e-3), (5500, 5.5e-4), (3000, 8.947e-4), (8000, 2.053e-4), (10000, 1e-4), (15000, 1e-4)],
)
def test_cosine_gives_the_published_values(t, rate):
    assert cosine(t, **LLM) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize(
    ("t", "rate"), [(1, 1e-6), (1000, 1e-3), (5500, 5.5e-4), (3250, 7.75e-4), (10000, 1e-4), (15000, 1e-4)]
)
def test_linear_is_the_straight_line(t, rate):
    assert linear(t, **LLM) == pytest.approx(rate)


def test_constant_stays_at_the_peak():
    assert [Constant(warmup_steps=4).rate(t, 2.0) for t in (1, 2, 4, 5, 10**6)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_inverse_square_root_halves_when_the_step_quadruples():
    rate = [InverseSquareRoot(warmup_steps=100).rate(t, 1.0) for t in (50, 100, 400, 1600)]
    assert rate == pytest.approx([0.5, 1.0, 0.5, 0.25])
    assert InverseSquareRoot().rate(9, 1.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("total", "rate"), [(20, 1 - math.sqrt(0.5)), (10, 1.0)])  # the second has no step left
def test_a_decay_of_the_remaining_steps_begins_at_the_rate_of_its_checkpoint(total, rate):
    decay = Decay()
    decay.load_state_dict({"began": 10, "rates": [1.0]})
    decay.resolve(SimpleNamespace(max_steps=total))
    assert decay.rate(10, 1.0) == 1.0
    assert decay.rate((10 + total) // 2, 1.0) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("shape", "middle"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("one_minus_sqrt", 0.1 + 0.9 * (1 - math.sqrt(0.5))),  # 0.3636
        ("exponential", math.sqrt(0.1)),  # halfway in the exponent: 0.3162
    ],
)
def test_wsd_is_stable_then_decays_in_the_given_shape(shape, middle):
    rates = [
        wsd(t, peak=1.0, final=0.1, warmup_steps=10, total_steps=100, decay_steps=20, shape=shape)
        for t in (1, 10, 50, 80, 90, 100, 101)
    ]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 1.0, middle, 0.1, 0.1])


@pytest.mark.parametrize("shape", ["linear", "cosine", "one_minus_sqrt", "exponential"])
def test_a_group_whose_rate_is_zero_stays_at_zero(shape):
    assert [decayed(x, peak=0.0, final=0.0, shape=shape) for x in (0.1, 0.5, 1.0)] == [0.0, 0.0, 0.0]


def test_the_rate_before_a_wsd_decay_does_not_depend_on_the_horizon():
    def stable(total):
        return [
            wsd(t, peak=1.0, final=0.0, warmup_steps=5, total_steps=total, decay_steps=10, shape="linear") for t in range(1, 91)
        ]

    assert stable(100) == stable(1000)


class Rates(torch.optim.SGD):
    """Records the learning rates that each update uses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.used = []

    def step(self, closure=None):
        result = super().step(closure)
        self.used.append([group["lr"] for group in self.param_groups])
        return result


class WithRates(Foreign):
    def configure_optimizers(self):
        groups = super().configure_optimizers().param_groups
        self.optimizer = Rates(
            [{"params": g["params"], "lr": g["lr"], **({"name": g["name"]} if "name" in g else {})} for g in groups],
            lr=self.lr,
        )
        return self.optimizer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_update_uses_the_rate_of_its_number_and_the_row_says_so(tmp_path, accumulate):
    module = WithRates(steps=6, lr=0.1)
    callback = Cosine(warmup_steps=2, final_ratio=0.1)
    _, _, rows = fit([callback], tmp_path, module=module, steps=6, accumulate_grad_batches=accumulate)
    expected = [cosine(t, peak=1.0, final=0.1, warmup_steps=2, total_steps=6) for t in range(1, 7)]
    assert [used[1] for used in module.optimizer.used] == pytest.approx([0.1 * e for e in expected])
    assert [used[0] for used in module.optimizer.used] == pytest.approx([0.2 * e for e in expected])
    assert list(rows) == [1, 2, 3, 4, 5, 6]  # one row an optimizer step, not one a micro-batch
    assert [rows[t]["lr"] for t in rows] == [used[0] for used in module.optimizer.used]
    assert [rows[t]["lr/1"] for t in rows] == [used[1] for used in module.optimizer.used]  # no name: its index


def test_groups_with_one_peak_give_one_curve_and_named_groups_their_name(tmp_path):
    class Same(Foreign):
        def configure_optimizers(self):
            return torch.optim.SGD([{"params": [p]} for p in self.parameters()], lr=0.5)

    class Named(Foreign):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.param_groups[1]["name"] = "matrix"
            return optimizer

    _, _, rows = fit([Constant()], tmp_path, module=Same(steps=1), steps=1)
    assert rows[1] == {"lr": 0.5}
    _, _, rows = fit([Constant()], tmp_path, module=Named(steps=1, lr=0.1), steps=1)
    assert rows[1] == {"lr": 0.2, "lr/matrix": 0.1}


@pytest.mark.parametrize("callback", [Cosine, Linear, WSD])
def test_a_resumed_run_takes_its_rates_from_the_step_not_from_the_checkpoint(tmp_path, callback):
    def make():
        return callback(warmup_steps=3, total_steps=10)

    straight = WithRates(steps=10)
    fit([make()], tmp_path, module=straight, steps=10)
    first = make_trainer([make()], tmp_path, steps=5)
    first.fit(WithRates(steps=5))
    first.save_checkpoint(tmp_path / "five.ckpt")
    resumed = WithRates(steps=10)
    fit([make()], tmp_path, module=resumed, steps=10, resume=tmp_path / "five.ckpt")
    assert len(resumed.optimizer.used) == 5
    assert resumed.optimizer.used == straight.optimizer.used[5:]
    assert make().state_dict() == {}


def test_wsd_decays_over_the_last_fifth_by_default(tmp_path):
    rows = fit([WSD(shape="linear", final_ratio=0.0)], tmp_path, steps=10)[2]
    assert [round(rows[t]["lr"] / 0.2, 6) for t in range(6, 11)] == [1, 1, 1, 0.5, 0]
    rows = fit([WSD(shape="linear", final_ratio=0.0, decay_steps=4)], tmp_path, steps=10)[2]
    assert [round(rows[t]["lr"] / 0.2, 6) for t in range(6, 11)] == [1, 0.75, 0.5, 0.25, 0]


def test_a_rate_held_in_a_tensor_is_changed_in_place(tmp_path):
    class TensorRate(Foreign):
        def configure_optimizers(self):
            self.rate = torch.tensor(0.4)
            return torch.optim.Adam(self.parameters(), lr=self.rate, capturable=False, foreach=False)

    _, module, rows = fit([Constant(warmup_steps=4)], tmp_path, module=TensorRate(steps=2), steps=2)
    assert rows[2]["lr"] == pytest.approx(0.2)
    assert module.rate.item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WSD(final_ratio=0.0, shape="exponential"), "never reaches 0"),
        (lambda: WSD(shape="step"), r"WSD\(shape\) is 'step'"),
    ],
)
def test_shapes_that_do_not_work_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("callback", "steps", "message"),
    [
        (Cosine(warmup_steps=9), 8, "warmup_steps is 9 but the schedule ends after 8"),
        (WSD(warmup_steps=6, decay_steps=3), 8, "overlap in a schedule of 8"),
        (Cosine(), -1, r"Trainer\(max_steps\) or Cosine\(total_steps\)"),
    ],
)
def test_a_horizon_that_does_not_fit_is_refused_before_training(tmp_path, callback, steps, message):
    module = Foreign(steps=8)
    with pytest.raises(ValueError, match=message):
        make_trainer([callback], tmp_path, steps=steps).fit(module)
    assert module.seen == []


class Finite(Foreign):
    def train_dataloader(self):
        return DataLoader(Batches(5), batch_size=None)


def test_epochs_over_data_of_known_length_say_where_the_schedule_ends(tmp_path):
    """5 batches, two a step, 4 epochs: 3 steps an epoch, 12 in all."""
    trainer = make_trainer([Linear(final_ratio=0.0)], tmp_path, steps=-1, accumulate_grad_batches=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Finite())
    rates = [row["lr"] for row in trainer.logger.rows.values()]
    assert rates == pytest.approx([0.2 * (1 - t / 12) for t in range(1, 13)])


def test_epochs_with_changing_accumulation_need_a_number_of_steps(tmp_path):
    """Lightning's estimate takes the accumulation before the first epoch for all: 10 steps instead of 5 + 3."""
    module = Finite()
    trainer = make_trainer([Linear(), GradientAccumulationScheduler({0: 1, 1: 2})], tmp_path, steps=-1)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match=r"Trainer\(max_steps\) or Linear\(total_steps\)"):
        trainer.fit(module)
    assert module.seen == []


class Unfreezes(BaseFinetuning):
    """The head, before update 5, with a rate of 0.5."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.head)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.head, optimizer, lr=0.5)


@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_is_added_while_training_follows_the_schedule_from_its_own_rate(tmp_path, first):
    """Epochs of two steps. The peaks are 0.1 and 0.5, in the run and in its continuation."""

    class OneGroup(Foreign):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def run(folder, steps, resume=None):
        schedule = Linear(final_ratio=0.0, total_steps=10)
        callbacks = [schedule, Unfreezes()] if first else [Unfreezes(), schedule]
        callbacks.append(StepCheckpoint(6, monitor=None))
        return fit(callbacks, tmp_path / folder, module=OneGroup(), steps=steps, resume=resume, limit_train_batches=2)

    trainer, _, rows = run("first", 6)
    assert [rows[t]["lr"] for t in (1, 6)] == pytest.approx([0.09, 0.04])
    assert [rows[t].get("lr/1") for t in (4, 5, 6)] == [None, pytest.approx(0.25), pytest.approx(0.2)]
    *_, rows = run("second", 8, trainer.checkpoint_callback.last_model_path)
    assert [rows[8]["lr"], rows[8]["lr/1"]] == pytest.approx([0.02, 0.1])


def test_a_second_run_of_a_schedule_forgets_the_groups_that_the_first_one_added(tmp_path):
    class OneGroup(Foreign):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    schedule = Linear(final_ratio=0.0, total_steps=10)
    for name in ("first", "second"):
        *_, rows = fit([schedule, Unfreezes()], tmp_path / name, module=OneGroup(), steps=6, limit_train_batches=2)
        assert [rows[6]["lr"], rows[6]["lr/1"]] == pytest.approx([0.04, 0.2]), name


@pytest.mark.parametrize("callback", [Cosine(warmup_steps=9), WSD(warmup_steps=9, decay_steps=50), Linear(9, total_steps=12)])
def test_a_fast_dev_run_makes_the_first_steps_of_a_longer_run(tmp_path, callback):
    module = Foreign(steps=8, lr=0.9)
    trainer = make_trainer([callback], tmp_path, steps=8, fast_dev_run=2)
    trainer.fit(module)
    assert trainer.max_steps == trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[1]["lr"] == pytest.approx(0.9 * 2 / 9)  # the second step of nine to the peak


class Halves(Schedule):
    def rate(self, t, peak):
        return peak / 2**t


class OwnInit(Halves):
    def __init__(self, divisor=1):  # does not call super().__init__
        self.divisor = divisor


def test_a_subclass_need_not_call_the_base_init(tmp_path):
    trainer, _, rows = fit([OwnInit(), StepCheckpoint(2, monitor=None)], tmp_path / "a", module=Foreign(lr=0.8), steps=2)
    assert [rows[t]["lr/1"] for t in (1, 2)] == pytest.approx([0.4, 0.2])
    saved = trainer.checkpoint_callback.last_model_path
    *_, rows = fit([OwnInit()], tmp_path / "b", module=Foreign(lr=0.8), steps=3, resume=saved)
    assert rows[3]["lr/1"] == pytest.approx(0.1)


def test_a_subclass_that_ignores_its_warmup_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Halves.* 3 .*warmup_steps"):
        fit([Halves(warmup_steps=3)], tmp_path)


def test_a_second_schedule_in_the_module_is_refused(tmp_path):
    class Scheduled(Foreign):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with pytest.raises(ValueError, match=r"Constant and the StepLR returned by Scheduled\.configure_optimizers"):
        fit([Constant()], tmp_path, module=Scheduled())
