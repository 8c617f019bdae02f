"""StopOnSignal: after a signal, a run stops between two optimizer steps and saves a checkpoint."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import fork_server
import pytest
from foreign import IMPORTS, Batches, Foreign, fit, make_trainer, run_ranks
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from lit_llm.callbacks import (
    GradientNorm,
    StepCheckpoint,
    StopOnSignal,
    Throughput,
    TimeBreakdown,
    ValidateEvery,
    ignore_signals,
)


class Told(Foreign):
    """Sends signals to its own process: {index of the micro-batch: signals}."""

    def __init__(self, signals=None, **kwargs):
        super().__init__(**kwargs)
        self.signals = signals or {}

    def training_step(self, batch, batch_idx):
        for signum in self.signals.get(batch_idx, ()):
            os.kill(os.getpid(), signum)
        return super().training_step(batch, batch_idx)


def run(tmp_path, module, callbacks=(), resume=None, **kwargs):
    stop = StopOnSignal()
    folder = [StepCheckpoint(1000, monitor=None, dirpath=str(tmp_path / "checkpoints"))]
    trainer, module, _ = fit([stop, *callbacks, *folder], tmp_path, module=module, resume=resume, **kwargs)
    return trainer, module, stop


def parameters(module):
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_it_finishes_the_optimizer_step_saves_stops_and_goes_on_exactly(tmp_path, name):
    _, whole, _ = run(tmp_path / "whole", Told(), accumulate_grad_batches=2)
    signals = {4: [getattr(signal, name)]}  # the first micro-batch of step 3
    trainer, part, stop = run(tmp_path, Told(signals), accumulate_grad_batches=2)
    assert trainer.global_step == 3 and len(part.seen) == 6
    assert stop.stopped_by == name and stop.save_now
    assert os.readlink(tmp_path / "checkpoints" / "last.ckpt") == "step-00000003.ckpt"
    _, rest, stop = run(tmp_path, Told(), resume=tmp_path / "checkpoints" / "last.ckpt", accumulate_grad_batches=2)
    assert part.seen + rest.seen == whole.seen and parameters(rest) == parameters(whole)
    assert stop.stopped_by is None and not stop.save_now


def test_the_handlers_from_before_are_back_afterwards(tmp_path):
    def own(signum, frame): ...

    before = {s: signal.signal(s, own) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        run(tmp_path, Told({0: [signal.SIGTERM]}))
        assert all(signal.getsignal(s) is own for s in before)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_they_are_ours_while_the_last_checkpoint_is_written(tmp_path):
    class Late(StepCheckpoint):
        def on_train_end(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGUSR1)  # would end the process
            super().on_train_end(trainer, pl_module)

    fit([StopOnSignal(), Late(1000, monitor=None)], tmp_path, steps=2)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_a_second_interrupt_stops_at_once(tmp_path):
    module = Told({5: [signal.SIGINT, signal.SIGTERM, signal.SIGINT]}, steps=8)
    with pytest.raises(SystemExit):  # Lightning's answer to KeyboardInterrupt
        run(tmp_path, module)
    assert len(module.seen) == 5 and not (tmp_path / "checkpoints").exists()


def test_the_validation_that_lightning_adds_to_a_stop_is_not_made(tmp_path):
    options = {"limit_val_batches": 1.0}
    _, part, _ = run(tmp_path, Told({4: [signal.SIGTERM]}), [ValidateEvery(4)], **options)
    assert part.validated == [4]
    _, rest, _ = run(tmp_path, Told(), [ValidateEvery(4)], resume=tmp_path / "checkpoints" / "last.ckpt", **options)
    assert rest.validated == [8]


@pytest.mark.parametrize("source", ["ValidateEvery", "val_check_interval"])
def test_a_validation_that_is_due_at_the_stop_is_made_by_the_resumed_run_before_its_first_step(tmp_path, source):
    callbacks, options = sources_of_validation(source)
    _, part, stop = run(tmp_path, Told({3: [signal.SIGTERM]}), callbacks(), **options)
    assert part.validated == [] and part.ends == [4] and stop.stopped_by
    _, rest, _ = run(tmp_path, Told(), callbacks(), resume=tmp_path / "checkpoints" / "last.ckpt", **options)
    assert rest.validated == [4, 8] and [step for step, _ in rest.seen] == [4, 5, 6, 7]


class ToldInValidation(Foreign):
    """Sends SIGTERM to its own process in batch `at` = (optimizer steps made, batch) of a validation. `logged`: its values."""

    def __init__(self, at=None, **kwargs):
        super().__init__(**kwargs)
        self.at, self.batches, self.modes = at, [], []

    def val_dataloader(self):
        return DataLoader(Batches(5), batch_size=None)

    def validation_step(self, batch, batch_idx):
        self.batches.append((self.trainer.global_step, batch_idx))
        if self.batches[-1] == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)

    def on_train_end(self):
        super().on_train_end()
        self.modes.append(self.training)


def sources_of_validation(source):
    if source == "ValidateEvery":
        return lambda: [ValidateEvery(4)], {"limit_val_batches": 1.0}
    return list, {"limit_val_batches": 1.0, "val_check_interval": 4, "check_val_every_n_epoch": None}


def whole_validation(step):
    return [(step, batch) for batch in range(5)]


@pytest.mark.parametrize("source", ["ValidateEvery", "val_check_interval"])
@pytest.mark.parametrize("step", [4, 8])  # 8 is the last
def test_a_signal_during_validation_stops_before_its_next_batch_and_the_resumed_run_makes_it_exactly(tmp_path, source, step):
    callbacks, options = sources_of_validation(source)

    def trained(folder, at=None, resume=None):
        (tmp_path / folder).mkdir(exist_ok=True)
        early = EarlyStopping("val/loss", patience=100)
        best = StepCheckpoint(1000, dirpath=str(tmp_path / folder / "checkpoints"))
        stop = StopOnSignal()
        module = ToldInValidation(at)
        callbacks_ = [*callbacks(), early, stop, GradientNorm(), Throughput(), TimeBreakdown(), best]
        trainer, module, rows = fit(callbacks_, tmp_path / folder, module=module, resume=resume, **options)
        rows = {x: {k: v for k, v in row.items() if k.startswith(("val", "grad"))} for x, row in rows.items()}
        return module, stop, {x: row for x, row in rows.items() if row}, early.state_dict(), best.best_model_score, trainer

    whole, _, rows, early, score, _ = trained("whole")
    assert whole.batches == whole_validation(4) + whole_validation(8)
    part, stop, rows_part, _, _, trainer = trained("part", at=(step, 1))
    assert part.batches == [*whole_validation(4)[: 0 if step == 4 else 5], (step, 0), (step, 1)]
    assert trainer.global_step == step and stop.stopped_by == "SIGTERM" and stop.save_now
    assert part.modes == [True]
    rest, stop, rows_rest, early_rest, score_rest, trainer = trained("part", resume=tmp_path / "part/checkpoints/last.ckpt")
    assert stop.stopped_by is None and trainer.global_step == 8 == trainer.max_steps
    assert rest.batches == [each for each in whole.batches if each[0] >= step]
    assert part.seen + rest.seen == whole.seen and parameters(rest) == parameters(whole)
    together = {x: rows_part.get(x, {}) | rows_rest.get(x, {}) for x in rows}
    assert together == rows and not any(rows_part.get(x, {}).keys() & rows_rest.get(x, {}).keys() for x in rows)
    assert early_rest == early and score_rest == score


def test_a_validation_at_the_end_of_an_epoch_that_is_not_the_end_of_training_is_finished(tmp_path):
    module = ToldInValidation((4, 1), steps=4)  # micro-batches of an epoch
    trainer = make_trainer([StopOnSignal()], tmp_path, steps=-1, limit_val_batches=1.0)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert module.batches == whole_validation(4) and module.validated == [4]


def test_least_numbers_of_steps_do_not_hold_it_up(tmp_path):
    trainer, _, _ = run(tmp_path, Told({1: [signal.SIGTERM]}), min_steps=6, min_epochs=3)
    assert trainer.global_step == 2
    assert trainer.min_steps == 6 and trainer.min_epochs == 3


def test_a_signal_at_the_last_step_does_not_count_as_an_interruption(tmp_path):
    trainer, _, stop = run(tmp_path, Told({7: [signal.SIGTERM]}))
    assert trainer.global_step == 8 and stop.stopped_by is None


def test_a_term_before_the_first_step_counts(tmp_path):
    class Early(Told):
        def train_dataloader(self):
            os.kill(os.getpid(), signal.SIGTERM)  # Lightning's handler is installed, ours is not
            return super().train_dataloader()

    trainer, _, stop = run(tmp_path, Early())
    assert trainer.global_step == 1 and stop.stopped_by == "SIGTERM"


def test_a_fit_in_another_thread_says_that_it_cannot(tmp_path):
    with pytest.warns(UserWarning, match="StopOnSignal does nothing: signals reach only the main thread"):
        thread = threading.Thread(target=run, args=(tmp_path, Told()))
        thread.start()
        thread.join()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


WORKERS = """
import os, signal, subprocess, sys
from pathlib import Path
from foreign import *
from lit_llm.callbacks import *

class Told(Foreign):
    def training_step(self, batch, batch_idx):
        if batch_idx == 20:
            if GROUP:
                group = f"-{os.getpgid(0)}"
                subprocess.run(["kill", "-TERM", "--", group], start_new_session=True)  # as a scheduler, from elsewhere
            else:
                raise KeyError("broken")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        order = FromGlobalStep(self.trainer, self.steps)
        return DataLoader(Batches(10**6), batch_size=None, sampler=order, num_workers=2, worker_init_fn=ignore_signals)

GROUP = sys.argv[2] == "group"
stop = StopOnSignal()
trainer = make_trainer([stop], Path(sys.argv[1]), steps=1000, every=1000, accumulate_grad_batches=16)
trainer.fit(Told(steps=1000))
print("stopped by", stop.stopped_by, "after", trainer.global_step)
"""


def run_with_workers(tmp_path, how):
    env = {**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKERS, str(tmp_path), how]
    return fork_server.run(command, env=env, capture_output=True, text=True, timeout=120, start_new_session=True)


def test_loader_workers_outlive_a_signal_to_the_process_group(tmp_path):
    done = run_with_workers(tmp_path, "group")
    assert "stopped by SIGTERM after 2" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_loader_workers_do_not_keep_a_process_that_an_exception_ends(tmp_path):
    done = run_with_workers(tmp_path, "exception")  # a hang is a TimeoutExpired
    assert done.returncode == 1 and "KeyError: 'broken'" in done.stderr


def test_a_loader_worker_ends_only_by_its_parent_or_with_it():
    """Tells apart SIGTERM from elsewhere, SIGTERM of the parent, and the parent's death."""
    for ending in ("terminate", "die"):
        pipe, end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        parent = context.Process(target=parent_of_a_worker, args=(end, ending))
        parent.start()
        worker = pipe.recv()
        os.kill(worker, signal.SIGTERM)  # not from its parent
        time.sleep(0.3)
        assert Path(f"/proc/{worker}").exists()
        pipe.send("now")
        deadline = time.monotonic() + 60
        while is_running(worker):
            assert time.monotonic() < deadline, f"the worker outlives: {ending}"
            time.sleep(0.02)
        parent.kill()
        parent.join()


def parent_of_a_worker(pipe, ending):
    worker = multiprocessing.get_context("fork").Process(target=a_worker, args=(pipe,))
    worker.start()
    pipe.recv()
    if ending == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    worker.terminate()
    worker.join()
    time.sleep(600)


def a_worker(pipe):
    ignore_signals(0)
    pipe.send(os.getpid())
    while True:
        time.sleep(600)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- several processes -------------------------------------------------------------------------------------------------

RANKS = """
import signal
from lit_llm.callbacks import *

class Told(Foreign):
    def __init__(self, who=(), at=5, signum=signal.SIGTERM):
        super().__init__(steps=6)
        self.who, self.at, self.signum = who, at, signum

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at and self.global_rank in self.who:
            os.kill(os.getpid(), self.signum)
        return super().training_step(batch, batch_idx)

def run(folder, module, resume=None, sort=StopOnSignal, others=(), limit_val_batches=1.0):
    stop = sort()
    callbacks = [stop, *others, StepSeed(), SpikeGuard(), StepCheckpoint(100, monitor=None, dirpath=str(OUT / folder))]
    trainer = make_trainer(callbacks, OUT, steps=6, accumulate_grad_batches=2, strategy="ddp", devices=2,
                           use_distributed_sampler=False, limit_val_batches=limit_val_batches)
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    trainer.strategy.barrier()
    return trainer, module, stop

class Lagging(StopOnSignal):  # as on an accelerator
    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._lags = True

def story(trainer, module, stop):
    return [trainer.global_step, stop.stopped_by, module.seen, len(module.validated)]

results = {"whole": story(*run("whole", Told()))}
cases = {"0": ([0],), "1": ([1],), "01": ([0, 1],), "int": ([1], 4, signal.SIGINT), "usr": ([0], 5, signal.SIGUSR1)}
for case, told in cases.items():
    results[case] = story(*run(case, Told(*told)))
    results[case + " resumed"] = story(*run(case, Told(), OUT / case / "last.ckpt"))
results["lagging"] = story(*run("lagging", Told([1]), sort=Lagging))
class ToldInValidation(Told):  # rank 1 validates more batches than rank 0
    def val_dataloader(self):
        return DataLoader(Batches(4 + self.global_rank), batch_size=None)

    def validation_step(self, batch, batch_idx):
        if (self.trainer.global_step, batch_idx) == self.at and self.global_rank in self.who:
            os.kill(os.getpid(), self.signum)
        batches.append((self.trainer.global_step, batch_idx))
        super().validation_step(batch, batch_idx)

for sort in (StopOnSignal, Lagging):
    name = f"validation {sort.__name__}"
    told = [[], (0, 0)], [[1], (3, 1)], [[], (0, 0)]
    for part, who_at, resume in zip(("whole", "part", "rest"), told, (None, None, OUT / f"{name} part" / "last.ckpt")):
        batches = []
        found = story(*run(f"{name} {part}", ToldInValidation(*who_at), resume, sort, [ValidateEvery(3)]))
        results[f"{name} {part}"] = [*found, batches]
last = run("last", Told([1], 11), sort=Lagging, limit_val_batches=0)
results["last"] = story(*last)
loop = last[0].fit_loop.epoch_loop
own = [*vars(loop), *vars(last[0]._signal_connector)]
report(last[0], results=results, own=[name for name in own if "sigterm" in name and name != "received_sigterm"])
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"), [("0", "SIGTERM"), ("1", "SIGTERM"), ("01", "SIGTERM"), ("int", "SIGINT"), ("usr", "SIGUSR1")]
)
def test_whichever_rank_gets_the_signal_all_stop_after_the_same_step_and_continue_exactly(ranks, case, name):
    for each in ranks:
        step, stopped_by, seen, validations = each["results"][case]
        assert (step, stopped_by, validations) == (3, name, 0)
        whole = each["results"]["whole"][2]
        assert seen == whole[:6] and each["results"][f"{case} resumed"][2] == whole[6:]
        assert each["results"][f"{case} resumed"][1] is None


@pytest.mark.slow
def test_where_the_host_runs_ahead_of_the_device_all_stop_one_step_later(ranks):
    for each in ranks:
        assert each["results"]["lagging"][:2] == [4, "SIGTERM"]
        assert each["results"]["last"][:2] == [6, None]  # no rank hangs if the result comes after the end
        assert each["own"] == []  # Lightning's broadcasts are restored


@pytest.mark.slow
@pytest.mark.parametrize(("sort", "batches"), [("StopOnSignal", 2), ("Lagging", 3)])
def test_a_signal_to_one_rank_during_validation_stops_it_on_all_at_the_same_batch_and_it_is_made_again(ranks, sort, batches):
    for rank, each in enumerate(ranks):
        whole, part, rest = (each["results"][f"validation {sort} {name}"] for name in ("whole", "part", "rest"))
        assert whole[4] == [[step, batch] for step in (3, 6) for batch in range(4 + rank)]
        assert part[:2] == [3, "SIGTERM"] and part[3] == 0 and part[4] == whole[4][:batches]
        assert rest[:2] == [6, None] and part[2] + rest[2] == whole[2] and rest[3:] == whole[3:]
