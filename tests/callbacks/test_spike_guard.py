"""SpikeGuard: which steps it skips, that a skipped step changes nothing, and its messages."""

import math
import random
import statistics
import warnings

import pytest
import torch
from foreign import Batches, Foreign, FromGlobalStep, fit, make_trainer
from lightning.pytorch import LightningDataModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_llm.callbacks import GradientNorm, SpikeGuard, StepCheckpoint, spike_guard
from lit_llm.optim import Lion, MuonAdamW

OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd momentum fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-3, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "muon": lambda p: MuonAdamW(p, lr=1e-3, adamw_lr=1e-3),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
}
ON_DEVICE = ["adamw fused", "sgd momentum fused", "adagrad fused", "muon", "lion"]


class InOrder(FromGlobalStep):
    def __init__(self, trainer, steps, order):
        super().__init__(trainer, steps)
        self.order = order

    def __iter__(self):
        return map(self.order.__getitem__, super().__iter__())


class Sick(Foreign):
    """Micro-batches in the order `order`. Those in `bad` have a broken loss or gradient."""

    def __init__(self, order, bad, make=OPTIMIZERS["adamw fused"]):
        super().__init__(steps=len(order))
        self.order, self.bad, self.make = order, bad, make

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        bad = self.bad.get(self.order[self.trainer.global_step])
        if bad == "gradient":
            return loss + 999 * (loss - loss.detach())  # of the loss as it is, 1000 times as large
        return loss + bad if bad == 100 else loss if bad is None else loss * bad

    def configure_optimizers(self):
        return self.make(self.parameters())

    def train_dataloader(self):
        return DataLoader(Batches(10**6), batch_size=None, sampler=InOrder(self.trainer, self.steps, self.order))


class Numbers(Foreign):
    """Has given losses and gradient norms per micro-batch. The weights never change."""

    def __init__(self, losses, norms):
        super().__init__(steps=len(losses))
        self.losses, self.norms = losses, norms
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        moving = self.weight * self.norms[batch_idx]
        return moving - moving.detach() + self.losses[batch_idx]

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.0)


def everything(module):
    """Parameters and optimizer state, as integers: NaN equals itself, -0.0 is not 0.0."""
    tensors = [*module.parameters()]
    for state in module.optimizers().optimizer.state_dict()["state"].values():
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [t.detach().view(torch.int32).tolist() for t in tensors]


def guarded(tmp_path, module, guard=None, before=(), **kwargs):
    guard = guard or SpikeGuard(window=16, min_steps=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, module, rows = fit([*before, guard], tmp_path, module=module, steps=module.steps, **kwargs)
    said = [str(w.message) for w in caught if "SpikeGuard" in str(w.message)]
    return trainer, guard, rows, said


# -- what is a spike ---------------------------------------------------------------------------------------------------


def expected_decisions(losses, norms, *, window, sigma, min_steps):
    good, skipped = [], []
    for pair in zip(losses, norms, strict=True):
        bad = not all(map(math.isfinite, pair))
        if len(good) >= min_steps:
            for values, new in zip(zip(*good[-window:], strict=True), pair, strict=True):
                bad |= new > statistics.fmean(values) + sigma * statistics.pstdev(values)
        skipped.append(bad)
        if not bad:
            good.append(pair)
    return skipped, good[-window:]


def test_decisions_are_those_of_the_formula(tmp_path):
    draw = random.Random(1)
    losses = [4 * math.exp(-i / 60) + draw.gauss(0, 0.1) for i in range(200)]
    norms = [1 + draw.gauss(0, 0.1) for _ in range(200)]
    for i in (0, 5, 31, 70, 71, 72, 150):
        losses[i] += draw.choice([5, 50, math.nan, math.inf])
    for i in (1, 40, 71, 100, 160, 199):
        norms[i] *= draw.choice([3, 1000, math.nan, math.inf])
    losses[120] = -math.inf
    losses[121] = -1e6  # far below: not a spike, but it widens the window
    settings = {"window": 50, "sigma": 3.0, "min_steps": 20}
    skipped, good = expected_decisions(losses, norms, **settings)
    assert 8 < sum(skipped) < 40
    guard = SpikeGuard(**settings, max_consecutive=1000)
    _, _, rows, _ = guarded(tmp_path, Numbers(losses, norms), guard)
    assert [bool(rows[t]["spike/skipped"]) for t in range(1, 201)] == skipped
    state = guard.state_dict()
    assert state["losses"] == pytest.approx([a for a, _ in good], rel=1e-6)
    assert state["norms"] == pytest.approx([b for _, b in good], rel=1e-6)


def test_a_text_known_by_heart_has_no_spikes_until_its_loss_returns(tmp_path):
    """From step 41 on, values below 1/10,000 of the first loss, which differ by factors; at the end a real spike."""
    draw = random.Random(2)
    learned = [10 ** draw.uniform(-8, -5) for _ in range(40)]
    losses = [5.0 * 0.7**i for i in range(40)] + learned + [2.0]
    norms = [1.0] * 40 + [100 * loss for loss in learned] + [1.0]
    norms[60] = 500.0
    _, _, rows, _ = guarded(tmp_path, Numbers(losses, norms), SpikeGuard(window=20, min_steps=10))
    assert [step for step, row in rows.items() if row["spike/skipped"]] == [81]


def test_equal_numbers_are_no_spikes(tmp_path):
    _, _, rows, said = guarded(tmp_path, Numbers([1 / 3] * 40, [0.1] * 40))
    assert sum(row["spike/skipped"] for row in rows.values()) == 0 and not said


def test_the_loss_is_the_mean_over_the_micro_batches_and_one_bad_one_spoils_the_step(tmp_path):
    losses, norms = [1.0, 2.0, math.nan, 4.0, 5.0, 8.0], [2.0, 4.0, 1.0, 1.0, 3.0, 3.0]
    module = Numbers(losses, norms)
    module.steps = 3
    _, guard, rows, _ = guarded(tmp_path, module, accumulate_grad_batches=2)
    assert guard.state_dict() == {"losses": [1.5, 6.5], "norms": [3.0, 3.0], "first": 1.5, "skipped": 0, "consecutive": 0}
    assert [rows[t]["spike/skipped"] for t in (1, 2, 3)] == [0, 1, 0]


class Masked(Numbers):
    """Says the loss of a step itself. None: the step has no target."""

    step_loss, step_count = None, None

    def training_step(self, batch, batch_idx):
        loss = self.losses[batch_idx]
        self.step_loss, self.step_count = torch.tensor(math.nan if loss is None else loss), torch.tensor(loss is not None)
        moving = self.weight * self.norms[batch_idx]
        return moving - moving.detach() + 99.0 * batch_idx  # not what the guard reads


def test_a_module_says_the_loss_of_its_steps_and_a_step_without_targets_is_no_observation(tmp_path):
    module = Masked([None, None, 1.0, 2.0, math.nan, None, math.nan, None, 3.0, 4.0], [0.0, 0.0, 5.0, 6.0, 1.0] + [0.0] * 5)
    module.norms[7] = math.nan  # weights are broken although there is no loss
    guard = SpikeGuard(max_consecutive=4)
    _, _, rows, _ = guarded(tmp_path, module, guard)
    assert [rows[step]["spike/skipped"] for step in range(1, 11)] == [0, 0, 0, 0, 1, 0, 1, 1, 0, 0]
    state = {"losses": [1.0, 2.0, 3.0, 4.0], "norms": [5.0, 6.0, 0.0, 0.0], "first": 1.0, "skipped": 0, "consecutive": 0}
    assert guard.state_dict() == state and guard.diagnosis is None
    sick = Masked([1.0] + [math.nan, None] * 4, [1.0] + [1.0, 0.0] * 4)
    guarded(tmp_path, sick, guard := SpikeGuard(max_consecutive=3))
    assert "the last 3 steps were all skipped" in guard.diagnosis and guard.state_dict()["consecutive"] == 3


def test_a_window_that_the_epoch_cuts_short_has_the_mean_of_its_micro_batches(tmp_path):
    module = Numbers([1.0, 2.0, 4.0, 8.0, 5.0, 7.0], [1.0] * 6)
    module.steps = 2
    _, guard, _, _ = guarded(tmp_path, module, accumulate_grad_batches=4, limit_train_batches=6)
    assert guard.state_dict()["losses"] == [15 / 4, 12 / 2]


@pytest.mark.parametrize("clip", [1.0, None])
def test_the_norm_is_that_before_clipping_in_any_order_of_the_callbacks(tmp_path, clip):
    norms = [3.0, 0.5, 7.0]
    for callbacks in ([GradientNorm(clip), SpikeGuard()], [SpikeGuard(), GradientNorm(clip)]):
        fit(callbacks, tmp_path, module=Numbers([1.0] * 3, norms), steps=3, every=2)
        guard = next(c for c in callbacks if isinstance(c, SpikeGuard))
        assert guard.state_dict()["norms"] == norms


# -- no trace ----------------------------------------------------------------------------------------------------------

BAD = {0: math.nan, 1: math.inf, 14: "gradient", 15: math.nan, 16: "gradient", 20: 100, 23: math.inf}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("norm", [[], [GradientNorm(0.5)]], ids=["", "clipped"])
def test_a_skipped_step_is_bit_for_bit_no_step(tmp_path, make, norm):
    sick = Sick(list(range(26)), BAD, make)
    _, _, rows, _ = guarded(tmp_path, sick, before=norm)
    well = Sick([i for i in range(26) if i not in BAD], {}, make)
    _, _, well_rows, _ = guarded(tmp_path, well, before=norm)
    assert [t - 1 for t in rows if rows[t]["spike/skipped"]] == list(BAD)
    assert not any(row["spike/skipped"] for row in well_rows.values())
    assert everything(sick) == everything(well)
    assert everything(well) != everything(fit([], tmp_path, module=Sick([0], {}, make), steps=1)[1])


def test_a_run_without_spikes_is_bit_for_bit_the_run_without_the_guard(tmp_path):
    for name in OPTIMIZERS:
        _, guard, _, _ = guarded(tmp_path, module := Sick(list(range(20)), {}, OPTIMIZERS[name]))
        assert len(guard.state_dict()["losses"]) == 16
        assert everything(module) == everything(
            fit([], tmp_path, module=Sick(list(range(20)), {}, OPTIMIZERS[name]), steps=20)[1]
        )


class HostReads(TorchDispatchMode):
    """Counts every call of `item()`."""

    def __init__(self, module):
        super().__init__()
        self.module, self.steps = module, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        trainer = self.module._trainer
        training = trainer is not None and trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
        if training and func is torch.ops.aten._local_scalar_dense.default:
            self.steps.append(self.module.trainer.global_step + 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ON_DEVICE)
def test_between_rows_the_host_reads_nothing(tmp_path, monkeypatch, name):
    # On a CPU the host reads the result for our own optimizers. Force the path of an accelerator.
    monkeypatch.setattr("lit_llm.callbacks.spike_guard._is_fused", lambda optimizer: True)
    module = Sick(list(range(12)), {3: math.nan, 7: math.inf}, OPTIMIZERS[name])
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(module.trainer.global_step + 1) or tolist(t))
    with HostReads(module) as reads:
        _, _, rows, _ = guarded(tmp_path, module, every=5)
    # The host reads the result for torch's fused SGD before its momentum exists. Step 13: the unread rest at the end.
    assert set(reads.steps) <= ({1} if "sgd" in name else set())
    assert lists == [1, 5, 10, 13]
    assert [rows[t]["spike/skipped"] for t in (1, 5, 10)] == [0, 1, 1]


def test_the_unread_are_read_in_time_when_nothing_is_logged(tmp_path):
    losses = [1.0] * 150
    losses[2] = math.nan
    _, guard, rows, said = guarded(tmp_path, Numbers(losses, [1.0] * 150), every=1000)
    assert list(rows) == [1] and guard.state_dict()["skipped"] == 1 and len(said) == 1


@pytest.mark.parametrize("name", ["adamw fused", "sgd momentum"])
def test_a_resumed_run_decides_the_same(tmp_path, name):
    def run(steps, resume=None):
        module = Sick(list(range(24)), BAD, OPTIMIZERS[name])
        guard = SpikeGuard(window=16, min_steps=8, max_consecutive=30)
        trainer = make_trainer([GradientNorm(0.5), guard], tmp_path, steps=steps, every=5)
        trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
        return trainer, module, guard

    whole = run(24)
    run(16)[0].save_checkpoint(tmp_path / "16.ckpt")
    resumed = run(24, tmp_path / "16.ckpt")
    assert everything(resumed[1]) == everything(whole[1])
    assert resumed[2].state_dict() == whole[2].state_dict()
    assert resumed[0].logger.rows[20] == whole[0].logger.rows[20]
    assert whole[0].logger.rows[20]["spike/skipped"] == 2  # steps 16, before the cut, and 17


def test_a_window_of_another_length_takes_the_newest(tmp_path):
    state = {"losses": [1.0, 2.0, 3.0], "norms": [4.0, 5.0, 6.0], "first": 1.0, "skipped": 1, "consecutive": 1}
    for window, losses in ((2, [2.0, 3.0]), (3, [1.0, 2.0, 3.0]), (9, [1.0, 2.0, 3.0])):
        guard = SpikeGuard(window=window, min_steps=2)
        guard.load_state_dict(state)
        assert guard.state_dict()["losses"] == losses
    empty = SpikeGuard()
    empty.load_state_dict(SpikeGuard().state_dict())
    assert empty.state_dict()["losses"] == []


# -- messages and the stop ---------------------------------------------------------------------------------------------


class Counting(LightningDataModule):
    """A data module with `step_samples`."""

    @property
    def step_samples(self):
        return range(self.trainer.global_step * 8, self.trainer.global_step * 8 + 8)

    def train_dataloader(self):
        return DataLoader(Batches(12), batch_size=None)


def test_skipped_steps_are_named_with_their_samples(tmp_path):
    losses = [1.0] * 12
    losses[2], losses[4], losses[5], losses[6], losses[7] = math.nan, math.inf, math.nan, math.nan, 50.0
    trainer = make_trainer([SpikeGuard(window=4, min_steps=2)], tmp_path, steps=12, every=4)
    with pytest.warns(UserWarning, match="SpikeGuard") as caught:
        trainer.fit(Numbers(losses, [0.5] * 12), datamodule=Counting())
    said = [str(w.message) for w in caught if "SpikeGuard" in str(w.message)]
    assert said[0] == (
        "SpikeGuard skipped optimizer step 3 (loss nan, limit 1; gradient norm 0.5, limit 0.5, global samples 16 to 23)."
    )
    assert said[1].startswith("SpikeGuard skipped optimizer step 5 (loss inf, ") and "samples 32 to 39), 6 (" in said[1]
    assert said[1].endswith("samples 48 to 55), and 1 more.") and len(said) == 2
    assert [trainer.logger.rows[t]["spike/skipped"] for t in (1, 4, 8, 12)] == [0, 1, 4, 0]


def test_too_many_in_a_row_stop_the_run_with_the_last_good_weights_saved(tmp_path):
    bad = dict.fromkeys(range(7, 40), math.nan)
    module = Sick(list(range(40)), bad)
    guard = SpikeGuard(max_consecutive=3)
    trainer, _, rows, said = guarded(tmp_path, module, guard, before=[StepCheckpoint(100, monitor=None)], every=5)
    assert trainer.global_step == 10  # the third in a row was step 10, which is logged
    assert "stops training at optimizer step 10: the last 3 steps were all skipped" in guard.diagnosis
    assert "no longer finite" in guard.diagnosis and said[-1] == guard.diagnosis
    assert rows[10]["spike/skipped"] == 3
    well = fit([], tmp_path, module=Sick(list(range(7)), {}), steps=7)[1]
    assert everything(module) == everything(well)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_a_new_level_is_diagnosed_as_one(tmp_path):
    guard = SpikeGuard(window=8, min_steps=4, max_consecutive=3)
    trainer, _, _, _ = guarded(tmp_path, Numbers([1.0] * 8 + [9.0] * 20, [1.0] * 28), guard)
    assert trainer.global_step == 11 and "moved to another level" in guard.diagnosis


def test_good_steps_between_bad_ones_keep_the_run_going(tmp_path):
    losses = [math.nan, math.nan, 1.0] * 5
    trainer, guard, _, _ = guarded(tmp_path, Numbers(losses, [1.0] * 15), SpikeGuard(max_consecutive=3))
    assert trainer.global_step == 15 and guard.diagnosis is None


# -- fp16 --------------------------------------------------------------------------------------------------------------


def half(**kwargs):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **kwargs))]}


def test_fp16_loss_scaling_is_seen_through_and_its_overflows_are_not_reported(tmp_path):
    norms = [2.0] * 12
    norms[5] = 3e38  # infinite when scaled
    module = Numbers([3.0] * 12, norms)
    _, guard, rows, said = guarded(tmp_path, module, **half(init_scale=16.0, growth_interval=2))
    state = guard.state_dict()
    assert state["losses"] == [3.0] * 11 and state["norms"] == pytest.approx([2.0] * 11)
    assert not said and not any(row["spike/skipped"] for row in rows.values())
    assert module.trainer.precision_plugin.scaler.get_scale() > 16


def test_fp16_with_a_fused_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"AdamW\(fused=True\).*Trainer\(precision\)"):
        guarded(tmp_path, Sick([0], {}), **half())


# -- the wrapped step --------------------------------------------------------------------------------------------------


def test_the_optimizer_is_given_back_as_it_was_also_with_a_torch_scheduler(tmp_path):
    class Scheduled(Sick):
        def configure_optimizers(self):
            optimizer = self.make(self.parameters())
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(DataLoader|dataloader|num_workers).*")
        _, module, _ = fit([SpikeGuard()], tmp_path, module=Scheduled([0, 1, 2], {}), steps=3)
    optimizer = module.optimizers().optimizer
    assert optimizer.step._wrapped_by_lr_sched and optimizer.step.__code__.co_filename != spike_guard.__file__
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    _, module, _ = fit([SpikeGuard()], tmp_path, module=Sick([0], {}), steps=1)
    assert "step" not in vars(module.optimizers().optimizer)
    assert not hasattr(module.optimizers().optimizer, "found_inf")


def test_a_subclass_of_a_fused_optimizer_is_not_trusted_with_found_inf(tmp_path):
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            loss = closure() if closure else None
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-0.1)
            return loss

    modules = []
    for order in ([0, 1, 2], [0, 2]):
        module = Sick(order, {1: math.nan}, lambda p: Own(p, fused=True))
        guarded(tmp_path, module)
        modules.append([p.tolist() for p in module.parameters()])
    assert modules[0] == modules[1]


def test_a_group_whose_fused_option_was_resumed_as_off_goes_the_slow_way(tmp_path):
    optimizer = OPTIMIZERS["adamw fused"]([nn.Parameter(torch.ones(2))])
    assert spike_guard.honours_found_inf(optimizer)
    optimizer.load_state_dict(OPTIMIZERS["adamw"]([nn.Parameter(torch.ones(2))]).state_dict())
    assert not spike_guard.honours_found_inf(optimizer)


def test_manual_optimization_is_guarded_too(tmp_path):
    class Manual(Sick):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    sick, well = Manual(list(range(6)), {2: math.nan}), Manual([0, 1, 3, 4, 5], {})
    guarded(tmp_path, sick)
    guarded(tmp_path, well)
    assert everything(sick) == everything(well)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_more_first_steps_than_the_window_has_are_refused_with_their_flag():
    with pytest.raises(ValueError, match=r"SpikeGuard\(min_steps\) is 32\b.*\b16"):
        SpikeGuard(window=16)


def test_several_optimizers_are_refused(tmp_path):
    class Two(Foreign):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return torch.optim.SGD(self.embed.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)

    with pytest.raises(ValueError, match="one optimizer, but Two has 2: remove SpikeGuard"):
        fit([SpikeGuard()], tmp_path, module=Two())
