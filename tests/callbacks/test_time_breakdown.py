"""TimeBreakdown with a simulated clock, so every figure is exact. Real processes: test_time_ranks.py."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from foreign import Batches, Foreign, fit, make_trainer
from lightning.pytorch.callbacks import Callback

from lit_llm.callbacks import Profile, StepCheckpoint, TimeBreakdown, ValidateEvery
from lit_llm.callbacks import time_breakdown as module_under_test

PARTS = ("data_stall", "forward", "backward", "communication", "optimizer", "checkpoint", "validation", "other")


class Clock:
    """Time passes only when a test advances it, so every figure is exact."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        times = SimpleNamespace(perf_counter=lambda: self.now, time_ns=lambda: int(self.now * 1e9))
        monkeypatch.setattr(module_under_test, "time", times)

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Pass(torch.autograd.Function):
    """The identity; time passes in its backward pass."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.passes(ctx.seconds)
        return grad, None, None


class Slow(Foreign):
    """A micro-batch takes 1 s to fetch, 2 s forward, 4 s backward; the update 8 s; validating a batch 16 s."""

    def __init__(self, clock, **kwargs):
        super().__init__(**kwargs)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.passes(2)
        return Pass.apply(super().training_step(batch, batch_idx), self.clock, 4)

    def validation_step(self, batch, batch_idx):
        self.clock.passes(16)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer, clock = super().configure_optimizers(), self.clock
        step = optimizer.step

        def slow_step(closure=None):
            result = step(closure)
            clock.passes(8)
            return result

        optimizer.step = slow_step
        return optimizer

    def train_dataloader(self):
        loader, clock = super().train_dataloader(), self.clock

        class SlowBatches(Batches):
            def __getitem__(self, i):
                clock.passes(1)
                return super().__getitem__(i)

        return torch.utils.data.DataLoader(SlowBatches(10**6), batch_size=None, sampler=loader.sampler)


def fractions(row):
    found = {part: row[f"time/{part}_fraction"] for part in PARTS}
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    return found


def of(total, **seconds):
    return pytest.approx({part: seconds.get(part, 0) / total for part in PARTS}, abs=1e-9)


def test_every_part_of_a_step_gets_its_share(tmp_path, clock):
    rows = fit([TimeBreakdown()], tmp_path, module=Slow(clock), every=4)[2]
    assert list(rows) == [4, 8]  # the first step is left out
    for t in (4, 8):
        assert fractions(rows[t]) == of(15, data_stall=1, forward=2, backward=4, optimizer=8)


@pytest.mark.parametrize("fold_at", [3, 4096])
def test_a_step_of_several_micro_batches(tmp_path, clock, monkeypatch, fold_at):
    monkeypatch.setattr(module_under_test, "_FOLD_AT", fold_at)
    rows = fit([TimeBreakdown()], tmp_path, module=Slow(clock), accumulate_grad_batches=3)[2]
    for t in range(2, 9):
        assert fractions(rows[t]) == of(29, data_stall=3, forward=6, backward=12, optimizer=8)


@pytest.mark.parametrize("first", [True, False])
def test_callbacks_count_with_what_they_belong_to(tmp_path, clock, first):
    class Lazy(Callback):
        def on_train_batch_start(self, *args):
            clock.passes(32)

        def on_before_backward(self, *args):
            clock.passes(64)

        def on_before_optimizer_step(self, *args):
            clock.passes(128)

        def on_train_batch_end(self, *args):
            clock.passes(256)

    callbacks = [Lazy(), TimeBreakdown()] if first else [TimeBreakdown(), Lazy()]
    rows = fit(callbacks, tmp_path, module=Slow(clock))[2]
    for t in range(2, 9):
        expected = of(495, data_stall=1, forward=2, backward=4 + 64, optimizer=8 + 128, other=32 + 256)
        assert fractions(rows[t]) == expected


def test_validation_and_saving_are_parts_of_their_own(tmp_path, clock, monkeypatch):
    class Find(Callback):
        def on_validation_end(self, trainer, pl_module):
            clock.passes(32)
            trainer.save_checkpoint(tmp_path / "best.ckpt")

    saves = StepCheckpoint(5, monitor=None)
    callbacks = [ValidateEvery(3), Find(), saves, TimeBreakdown()]
    trainer = make_trainer(callbacks, tmp_path, limit_val_batches=1.0, num_sanity_val_steps=1)
    dump = trainer._checkpoint_connector.dump_checkpoint

    def slow_dump(*args):
        clock.passes(64)
        return dump(*args)

    monkeypatch.setattr(trainer._checkpoint_connector, "dump_checkpoint", slow_dump)
    trainer.fit(Slow(clock))
    rows = trainer.logger.rows
    step = {"data_stall": 1, "forward": 2, "backward": 4, "optimizer": 8}
    assert [t for t in rows if "time/other_fraction" in rows[t]] == [2, 3, 4, 5, 6, 7, 8]
    for t in (2, 3, 5, 8):
        assert fractions(rows[t]) == of(15, **step)
    for t in (4, 7):  # validated after 3 and 6: two batches
        assert fractions(rows[t]) == of(15 + 32 + 32 + 64, **step, validation=64, checkpoint=64)
    assert fractions(rows[6]) == of(15 + 64, **step, checkpoint=64)


class Device:
    """Replaces the clock of a device: a time is not known before a synchronisation."""

    activity = torch.profiler.ProfilerActivity.CPU

    def __init__(self, clock):
        self.clock, self.known, self.added, self.syncs = clock, 0, 0, 0
        self.made = 0

    def now(self):
        self.made += 1
        return SimpleNamespace(number=self.made, at=self.clock.now)

    def passed(self, mark):
        return mark.number <= self.known

    def seconds(self, begin, end):
        assert self.passed(begin) and self.passed(end)
        self.added += 1
        return end.at - begin.at

    def synchronize(self):
        self.known, self.syncs = self.made, self.syncs + 1


def test_a_device_is_asked_for_its_times_only_once_it_has_got_there(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(module_under_test, "_FOLD_AT", 5)
    device = Device(clock)

    class OnDevice(TimeBreakdown):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self._clock = device

    rows = fit([OnDevice()], tmp_path, module=Slow(clock), every=4)[2]
    for t in (4, 8):
        assert fractions(rows[t]) == of(15, data_stall=1, forward=2, backward=4, optimizer=8)
    assert device.syncs == 3  # the first step and two rows
    assert device.added > 30


# ---- Communication ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_waiting_is_a_collective_and_no_computation(seed):
    draw = random.Random(seed)

    def spans(count):
        begins = [draw.randrange(60) for _ in range(count)]
        return [(begin, begin + draw.randrange(1, 15)) for begin in begins]

    collectives, computing = spans(4), spans(5)
    marks = [(t, draw.choice(["forward", "backward"])) for t in sorted(draw.sample(range(5, 70), 8))]
    waited, whole = {}, {}
    for (begin, _), (end, part) in pairwise(marks):
        for t in range(begin, end):  # one by one

            def now(spans, t=t):
                return any(a <= t < b for a, b in spans)

            whole[part] = whole.get(part, 0) + 1
            waited[part] = waited.get(part, 0) + (now(collectives) and not now(computing))
    assert module_under_test._waits(collectives, computing, marks) == {part: waited[part] / whole[part] for part in whole}


class Sampling(TimeBreakdown):
    """Samples communication on one process too."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._several = True


def test_on_one_process_nobody_waits_and_another_torch_profiler_is_left_alone(tmp_path):
    rows = fit([Sampling(3)], tmp_path)[2]
    assert [t for t in rows if "time/other_fraction" in rows[t]] == [4, 5, 6, 7, 8]  # after the sampled step 3
    assert all(fractions(rows[t])["communication"] == 0 for t in range(4, 9))
    with torch.profiler.profile() as recorded:
        rows = fit([Sampling(1)], tmp_path)[2]
    assert not any("time/other_fraction" in row for row in rows.values())
    assert any(event.name == "aten::embedding" for event in recorded.events())
    rows = fit([Profile(wait=1, steps=3), Sampling(99)], tmp_path, accumulate_grad_batches=2)[2]  # records steps 2 to 4
    assert [t for t in rows if "time/other_fraction" in rows[t]] == [6, 7, 8]  # after the sampled step 5


def test_a_run_that_breaks_while_a_step_is_sampled_leaves_no_profiler_behind(tmp_path):
    class Broken(Foreign):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 2:
                assert torch.autograd._profiler_enabled()
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken"):
        fit([Sampling()], tmp_path, module=Broken())
    assert not torch.autograd._profiler_enabled()


def test_what_cannot_be_told_apart_is_refused(tmp_path):
    module = Foreign()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="uses manual optimization"):
        fit([TimeBreakdown()], tmp_path, module=module)


def test_the_sampled_share_of_waits_becomes_communication():
    """Of 10 s: half of 6 s backward and a quarter of 2 s optimizer step were waits."""
    breakdown = TimeBreakdown()
    breakdown._seconds = dict.fromkeys(PARTS, 0.0) | {"forward": 2.0, "backward": 6.0, "optimizer": 2.0}
    breakdown._waits = {"backward": 0.5, "optimizer": 0.25}
    fractions = breakdown._fractions()
    assert fractions["time/communication_fraction"] == pytest.approx(0.35)
    assert fractions["time/backward_fraction"] == pytest.approx(0.3) and sum(fractions.values()) == pytest.approx(1)
