"""StepCheckpoint with slow or failing CheckpointIOs, and when saves are due."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from foreign import Foreign, fit, make_trainer, run_ranks
from lightning.pytorch.callbacks import Callback

from lit_llm.callbacks import WSD, StepCheckpoint, ValidateEvery
from lit_llm.callbacks import checkpoint as checkpoint_module
from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.runs.saved_run import find_checkpoint

VAL = {"limit_val_batches": 1.0}
IOS = [FolderCheckpointIO, AsyncFolderCheckpointIO]


def files(tmp_path):
    return sorted(int(p.name[5:-5]) for p in (tmp_path / "checkpoints").glob("[!.]*") if not p.is_symlink())


def link(tmp_path, name):
    return int(os.readlink(tmp_path / "checkpoints" / f"{name}.ckpt")[5:-5])


def saves_of(tmp_path, callbacks, steps=8, module=None, **options):
    """The saved steps, in order."""
    trainer = make_trainer(callbacks, tmp_path, steps=steps, **options)
    saves, save = [], trainer.save_checkpoint
    trainer.save_checkpoint = lambda path, *a, **k: (saves.append(trainer.global_step), save(path, *a, **k))
    trainer.fit(module or Foreign(steps=steps))
    return saves


# -- with our folders ---------------------------------------------------------------------------------------------------


def full_disk(at):
    """A full disk during the saves of these steps."""
    write = disk_format.write

    def writing(checkpoint, path):
        if checkpoint["global_step"] in at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(checkpoint, path)

    return writing


@pytest.mark.parametrize("io", IOS)
def test_a_full_disk_costs_those_saves_and_nothing_else(tmp_path, io, monkeypatch):
    straight = fit([], tmp_path, module=Foreign(steps=12), steps=12)[1]
    monkeypatch.setattr(disk_format, "write", full_disk(at=(4, 6)))
    with pytest.warns(UserWarning) as caught:
        callback = StepCheckpoint(2, keep_last=1, monitor=None)
        _, module, _ = fit([callback], tmp_path, module=Foreign(steps=12), steps=12, plugins=[io()])
    failed = [re.search(r"step-0+(\d+)\.ckpt could not be saved", str(w.message)) for w in caught]
    assert [match[1] for match in failed if match] == ["4", "6"]
    assert module.seen == straight.seen
    assert files(tmp_path) == [12] and link(tmp_path, "last") == 12


@pytest.mark.parametrize("io", IOS)
def test_a_best_that_could_not_be_saved_was_never_the_best(tmp_path, io, monkeypatch):
    """Losses 3, 1 (not saved), 2: the best on disk is the third."""
    monkeypatch.setattr(disk_format, "write", full_disk(at=(4,)))
    callback = StepCheckpoint(100, keep_last=1)
    module = Foreign(steps=8, val_losses=[3.0, 1.0, 2.0, 5.0])
    with pytest.warns(UserWarning, match="could not be saved"):
        fit([ValidateEvery(2), Waiting(), callback], tmp_path, module=module, plugins=[io()], **VAL)
    assert files(tmp_path) == [6, 8] and link(tmp_path, "best") == 6
    assert callback.best_model_score.item() == 2.0


class Waiting(Callback):
    """Waits for the writing thread before each step, so that a failed save is known at the next best."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for *_, future in getattr(trainer.strategy.checkpoint_io, "_jobs", []):
            future.exception()


class Slow:
    """A CheckpointIO whose saves finish when the test sets it, to test the time before."""

    def __init__(self):
        self.inner, self.pending, self.result = FolderCheckpointIO(), None, None

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.inner.save_checkpoint(checkpoint, path)
        self.pending, self.result = path, None

    def finished(self, path, *, wait=False):
        assert path == self.pending
        return True if wait else self.result

    def remove_checkpoint(self, path):
        self.inner.remove_checkpoint(path)

    def teardown(self): ...


def test_nothing_is_linked_or_deleted_before_the_save_is_known_to_be_good(tmp_path):
    """Saves at 2, 4, 6. The save of 4 finishes during step 6."""
    slow, looks = Slow(), {}

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            step = trainer.global_step
            slow.result = True if step == 3 or step == 5 else None  # during the steps that make 4 and 6
            if step >= 2:
                looks[step] = (files(tmp_path), link(tmp_path, "last") if os.path.lexists(last) else None)

    last = tmp_path / "checkpoints" / "last.ckpt"
    trainer = make_trainer([Look(), StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, steps=6)
    trainer.strategy._checkpoint_io = slow
    trainer.fit(Foreign(steps=6))
    assert looks == {2: ([2], None), 3: ([2], None), 4: ([2, 4], 2), 5: ([2, 4], 2)}
    assert files(tmp_path) == [6] and link(tmp_path, "last") == 6


@pytest.mark.parametrize("io", IOS)
def test_an_exception_right_after_a_save_leaves_it_linked(tmp_path, io):
    class Crash(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        fit([Crash(), StepCheckpoint(4, monitor=None)], tmp_path, plugins=[io()])
    assert files(tmp_path) == [4] and link(tmp_path, "last") == 4


def callbacks(sort, *more):
    return [*more, ValidateEvery(2), sort(2, keep_last=1)]


def module(*losses):
    return Foreign(steps=8, val_losses=losses or (3.0, 2.0, 1.0, 4.0))


def fit_and_kill(tmp_path, io, step, module, *more):
    """Killed after this step was published, and before last, best and stable pointed to it."""

    class Killed(StepCheckpoint):
        state_key = "StepCheckpoint"

        def _link_and_remove(self, trainer, files):
            if files.kept and files.kept[-1] == f"step-{step:08d}.ckpt":
                os._exit(9)
            super()._link_and_remove(trainer, files)

    child = os.fork()
    if child == 0:
        fit(callbacks(Killed, *more), tmp_path, module=module, plugins=[io()], **VAL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("io", IOS)
def test_links_and_deletions_that_a_kill_prevented_are_made_when_the_run_goes_on(tmp_path, io):
    fit_and_kill(tmp_path, io, 6, module(), WSD(decay_steps=2))
    assert files(tmp_path) == [4, 6] and link(tmp_path, "last") == 4
    resume = tmp_path / "checkpoints" / "step-00000006.ckpt"
    looks = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, *args):
            looks.append((files(tmp_path), [link(tmp_path, name) for name in ("last", "best", "stable")]))

    fit(callbacks(StepCheckpoint, Look(), WSD(decay_steps=2)), tmp_path, module=module(), resume=resume, plugins=[io()], **VAL)
    assert looks[-1][1] == [6, 6, 6]
    if io is FolderCheckpointIO:  # the other one deletes on a thread, which may still run
        assert looks[-1][0] == [6]
    assert files(tmp_path) == [6, 8] and [link(tmp_path, name) for name in ("last", "best", "stable")] == [8, 6, 6]


@pytest.mark.parametrize("io", IOS)
def test_they_are_made_too_when_no_step_is_left(tmp_path, io):
    """Killed after the last save, a resumed run trains no step, and Lightning calls no hook of training."""
    fit_and_kill(tmp_path, io, 8, module(1.0, 2.0, 3.0, 4.0))
    assert files(tmp_path) == [2, 6, 8] and link(tmp_path, "last") == 6
    resume = tmp_path / "checkpoints" / "step-00000008.ckpt"
    fit(callbacks(StepCheckpoint), tmp_path, module=module(), resume=resume, plugins=[io()], **VAL)
    assert files(tmp_path) == [2, 8] and [link(tmp_path, name) for name in ("last", "best")] == [8, 2]


# -- what is due --------------------------------------------------------------------------------------------------------


def test_permanent_ones_are_saved_and_stay(tmp_path):
    saves = saves_of(tmp_path, [StepCheckpoint(2, keep_last=1, monitor=None, keep_every_n_steps=5)], steps=12)
    assert saves == [2, 4, 5, 6, 8, 10, 12]
    assert files(tmp_path) == [5, 10, 12]


def test_a_permanent_one_stays_though_the_resumed_run_has_other_settings(tmp_path):
    fit([StepCheckpoint(2, keep_last=2, monitor=None, keep_every_n_steps=4)], tmp_path, module=Foreign(steps=4), steps=4)
    path = tmp_path / "checkpoints" / "last.ckpt"
    fit([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, module=Foreign(steps=8), resume=path)
    assert files(tmp_path) == [4, 8]


def test_the_last_step_before_the_decay_is_saved_linked_and_kept(tmp_path):
    schedule = WSD(decay_steps=3)
    assert schedule.stable_until is None
    saves = saves_of(tmp_path, [schedule, StepCheckpoint(4, keep_last=1, monitor=None)], steps=10)
    assert schedule.stable_until == 7
    rate = schedule.rate(7, 1.0), schedule.rate(8, 1.0)
    assert rate[0] == 1.0 > rate[1]  # 7 is the last at the peak
    assert saves == [4, 7, 8, 10]
    assert files(tmp_path) == [7, 10]
    assert link(tmp_path, "stable") == 7 and link(tmp_path, "last") == 10


def test_extended_from_the_stable_one_the_run_keeps_it_and_links_the_next(tmp_path):
    options = {"keep_last": 1, "monitor": None}
    fit([WSD(decay_steps=2), StepCheckpoint(100, **options)], tmp_path, module=Foreign(steps=6), steps=6)
    path = tmp_path / "checkpoints" / "stable.ckpt"
    assert link(tmp_path, "stable") == 4
    callbacks = [WSD(decay_steps=2), StepCheckpoint(100, **options)]
    fit(callbacks, tmp_path, module=Foreign(steps=10), steps=10, resume=path)
    assert files(tmp_path) == [4, 6, 8, 10] and link(tmp_path, "stable") == 8  # 6 is of the part that was left behind


class Signal(Callback):
    """Like StopOnSignal: requests a save and a stop at a step boundary."""

    save_now = False

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.save_now = trainer.should_stop = True


def test_save_now_does_not_wait_for_a_validation_and_is_saved_again_after_it(tmp_path):
    class Order(Callback):
        events = []  # noqa: RUF012

        def on_validation_start(self, trainer, pl_module):
            self.events.append(("validation begins", files(tmp_path)))

    module = Foreign(steps=8, val_losses=[3.0])
    saves = saves_of(tmp_path, [Order(), ValidateEvery(3), Signal(3), StepCheckpoint(100)], module=module, **VAL)
    assert Order.events == [("validation begins", [3])]
    assert saves == [3, 3] and link(tmp_path, "best") == 3


# -- minutes ------------------------------------------------------------------------------------------------------------


class Clock(Callback):
    """Time passes only in training steps, by given seconds."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.looks, self.seconds = 0.0, 0, seconds
        monkeypatch.setattr(checkpoint_module, "time", SimpleNamespace(monotonic=self.look))

    def look(self):
        self.looks += 1
        return self.now

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += self.seconds(trainer.global_step)


def test_minutes_count_from_the_last_save(tmp_path, monkeypatch):
    """10 s a step: due after steps 6 and 12. The save by steps at 15 restarts the minute, which ends at 21."""
    clock = Clock(monkeypatch, lambda step: 10)
    saves = saves_of(tmp_path, [clock, StepCheckpoint(15, monitor=None, every_n_minutes=1)], steps=24)
    assert saves == [6, 12, 15, 21, 24]


def test_the_clock_is_read_far_less_often_than_every_step_and_the_save_is_in_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, lambda step: 0.1)
    saves = saves_of(tmp_path, [clock, StepCheckpoint(10**6, monitor=None, every_n_minutes=1)], steps=1300)
    assert saves == pytest.approx([600, 1200, 1300], abs=2)
    assert clock.looks < 80


def test_first_steps_that_seem_to_take_no_time_do_not_put_the_save_off(tmp_path, monkeypatch):
    """A GPU only queues its first steps. 0.001 s each for ten steps, then 1 s: due after about step 70."""
    clock = Clock(monkeypatch, lambda step: 0.001 if step < 10 else 1.0)
    saves = saves_of(tmp_path, [clock, StepCheckpoint(10**6, monitor=None, every_n_minutes=1)], steps=130)
    assert 70 <= saves[0] <= 80


RANKS = """
import errno, os, warnings
from types import SimpleNamespace
from lit_llm.callbacks import *
from lit_llm.callbacks import checkpoint as checkpoint_module
from lightning.pytorch.callbacks import Callback
from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO

class Clock(Callback):
    # 10 s a step for rank 0; rank 1's clock runs 7 times as fast and began elsewhere.
    now = 0.0
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += 10
        rank = trainer.global_rank
        checkpoint_module.time = SimpleNamespace(monotonic=lambda: 1e6 * rank + self.now * (1 + 6 * rank))

write = disk_format.write
def full(checkpoint, path):
    if checkpoint["global_step"] == 14:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(checkpoint, path)
disk_format.write = full

def run(steps, resume=None):
    checkpoint = StepCheckpoint(100, keep_last=1, every_n_minutes=1, keep_every_n_steps=15)
    module = Foreign(steps=steps, val_losses=[3.0, 1.0, 2.0, 4.0][0 if resume is None else 2:])
    trainer = make_trainer([Clock(), ValidateEvery(4), checkpoint], OUT, steps=steps, strategy="ddp", devices=2,
                           limit_val_batches=1.0, use_distributed_sampler=False, plugins=[AsyncFolderCheckpointIO()])
    saves, save = [], trainer.save_checkpoint
    trainer.save_checkpoint = lambda path, *a, **k: (saves.append(trainer.global_step), save(path, *a, **k))
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module, checkpoint, saves

trainer, module, checkpoint, saves = run(16)
listing = sorted(p.name for p in (OUT / "checkpoints").iterdir())
trainer.strategy.barrier()
_, resumed, _, _ = run(16, OUT / "checkpoints" / "best.ckpt")
report(trainer, seen=module.seen, saves=saves, listing=listing, best=checkpoint.best_model_path,
       score=checkpoint.best_model_score.item(), last=checkpoint.last_model_path, resumed=resumed.seen)
"""


@pytest.mark.slow
def test_two_ranks_agree_on_time_on_failed_saves_and_resume_what_a_thread_wrote(tmp_path):
    """Losses 3, 1, 2, 4 at steps 4, 8, 12, 16. Step 14 is due by the clock, and the disk is full."""
    reports = run_ranks(RANKS, tmp_path)
    for each in reports:
        assert each["saves"] == [4, 8, 14, 15, 16]
        assert each["listing"] == ["best.ckpt", "last.ckpt"] + [f"step-{k:08d}.ckpt" for k in (8, 15, 16)]
        assert each["best"].endswith("step-00000008.ckpt") and each["score"] == 1.0
        assert each["last"].endswith("step-00000016.ckpt")
        assert each["resumed"] == each["seen"][8:]


@pytest.mark.parametrize("why", ["no links", "a folder of that name"])
def test_a_link_that_cannot_be_made_is_one_warning_and_no_resume_needs_it(why, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if why == "no links":  # as on FAT, or where no inode is left
        monkeypatch.setattr(Path, "symlink_to", refuse)
    else:  # as `cp -rL` leaves it
        (tmp_path / "checkpoints/last.ckpt").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"last\.ckpt") as warned:
        fit([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, steps=6, plugins=[FolderCheckpointIO()])
    assert sum("cannot be made a link" in str(each.message) for each in warned) == 1
    newest, _ = disk_format.newest_good(tmp_path / "checkpoints")
    assert newest.name == "step-00000006.ckpt" and find_checkpoint(tmp_path, "last") == newest
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
