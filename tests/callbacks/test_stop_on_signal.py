"""StopOnSignal: told to end, a run stops between two optimizer steps with everything saved."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from foreign import Foreign, fit, run_ranks
from ports import free_port

from lit_llm.callbacks import StepCheckpoint, StopOnSignal, ValidateEvery


class Told(Foreign):
    """Sends itself signals: {index of the micro-batch: its signals}."""

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
    assert stop.stopped_by == name and stop.save_now and stop.exit_code == 75
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


def test_two_terms_are_no_second_interrupt(tmp_path):
    module = Told({2: [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]})
    assert run(tmp_path, module)[0].global_step == 3


def test_the_validation_that_lightning_adds_to_a_stop_is_not_made(tmp_path):
    options = {"limit_val_batches": 1.0}
    _, part, _ = run(tmp_path, Told({4: [signal.SIGTERM]}), [ValidateEvery(4)], **options)
    assert part.validated == [4]
    _, rest, _ = run(tmp_path, Told(), [ValidateEvery(4)], resume=tmp_path / "checkpoints" / "last.ckpt", **options)
    assert rest.validated == [8]


def test_a_validation_that_is_due_at_the_last_step_is_made(tmp_path):
    _, part, stop = run(tmp_path, Told({3: [signal.SIGTERM]}), [ValidateEvery(4)], limit_val_batches=1.0)
    assert part.validated == [4] and part.ends == [4] and stop.stopped_by
    resume = tmp_path / "checkpoints" / "last.ckpt"
    _, rest, _ = run(tmp_path, Told(), [ValidateEvery(4)], resume=resume, limit_val_batches=1.0)
    assert rest.validated == [8] and [step for step, _ in rest.seen] == [4, 5, 6, 7]


def test_least_numbers_of_steps_do_not_hold_it_up(tmp_path):
    trainer, _, _ = run(tmp_path, Told({1: [signal.SIGTERM]}), min_steps=6, min_epochs=3)
    assert trainer.global_step == 2
    assert trainer.min_steps == 6 and trainer.min_epochs == 3


def test_a_signal_at_the_last_step_is_no_interruption(tmp_path):
    trainer, _, stop = run(tmp_path, Told({7: [signal.SIGTERM]}))
    assert trainer.global_step == 8 and stop.stopped_by is None


def test_a_term_before_the_first_step_counts(tmp_path):
    class Early(Told):
        def train_dataloader(self):
            os.kill(os.getpid(), signal.SIGTERM)  # Lightning's handler is there already, ours is not
            return super().train_dataloader()

    trainer, _, stop = run(tmp_path, Early())
    assert trainer.global_step == 1 and stop.stopped_by == "SIGTERM"


def test_the_same_trainer_can_go_on(tmp_path):
    trainer, _, stop = run(tmp_path, Told({1: [signal.SIGTERM]}))
    trainer.fit(Told(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert trainer.global_step == 8 and stop.stopped_by is None


def test_a_fit_in_another_thread_says_that_it_cannot(tmp_path):
    with pytest.warns(UserWarning, match="StopOnSignal does nothing: signals reach only the main thread"):
        thread = threading.Thread(target=run, args=(tmp_path, Told()))
        thread.start()
        thread.join()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


WORKERS = """
import os, signal, sys
from pathlib import Path
from foreign import *
from lit_llm.callbacks import *

class Told(Foreign):
    def training_step(self, batch, batch_idx):
        if batch_idx == 20:
            os.killpg(0, signal.SIGTERM)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        order = FromGlobalStep(self.trainer, self.steps)
        return DataLoader(Batches(10**6), batch_size=None, sampler=order, num_workers=2, worker_init_fn=ignore_signals)

stop = StopOnSignal()
trainer = make_trainer([stop], Path(sys.argv[1]), steps=1000, every=1000, accumulate_grad_batches=16)
trainer.fit(Told(steps=1000))
print("stopped by", stop.stopped_by, "after", trainer.global_step)
"""


def test_loader_workers_outlive_a_signal_to_the_process_group(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKERS, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert "stopped by SIGTERM after 2" in done.stdout, done.stderr[-3000:]


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

def run(folder, module, resume=None, sort=StopOnSignal):
    stop = sort()
    callbacks = [stop, StepSeed(), SpikeGuard(), StepCheckpoint(100, monitor=None, dirpath=str(OUT / folder))]
    trainer = make_trainer(callbacks, OUT, steps=6, accumulate_grad_batches=2, strategy="ddp", devices=2,
                           use_distributed_sampler=False, limit_val_batches=1.0)
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    trainer.strategy.barrier()
    return trainer, module, stop

class Lagging(StopOnSignal):  # as on an accelerator
    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._lags = True

def story(trainer, module, stop):
    return [trainer.global_step, stop.stopped_by, stop.exit_code, module.seen, len(module.validated)]

results = {"whole": story(*run("whole", Told()))}
cases = {"0": ([0],), "1": ([1],), "01": ([0, 1],), "int": ([1], 4, signal.SIGINT), "usr": ([0], 5, signal.SIGUSR1)}
for case, told in cases.items():
    results[case] = story(*run(case, Told(*told)))
    results[case + " resumed"] = story(*run(case, Told(), OUT / case / "last.ckpt"))
class Early(Told):  # before our handlers are there, Lightning's are
    def train_dataloader(self):
        if self.global_rank in self.who:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_dataloader()

results["early"] = story(*run("early", Early([1], at=-1)))
results["lagging"] = story(*run("lagging", Told([1]), sort=Lagging))
last = run("last", Told([1], 11), sort=Lagging)
results["last"] = story(*last)
loop = last[0].fit_loop.epoch_loop
own = [*vars(loop), *vars(last[0]._signal_connector)]
report(last[0], results=results, own=[name for name in own if "sigterm" in name and name != "received_sigterm"])
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("case", "name"), [("0", "SIGTERM"), ("1", "SIGTERM"), ("01", "SIGTERM"), ("int", "SIGINT"), ("usr", "SIGUSR1")]
)
def test_whichever_rank_is_told_all_stop_after_the_same_step_and_go_on_exactly(ranks, case, name):
    for rank, each in enumerate(ranks):
        step, stopped_by, exit_code, seen, validations = each["results"][case]
        assert (step, stopped_by, validations) == (3, name, 0)
        assert exit_code == (0 if rank else 75)  # Lightning's rank 0 kills everything when a child of it fails
        whole = each["results"]["whole"][3]
        assert seen == whole[:6] and each["results"][f"{case} resumed"][3] == whole[6:]
        assert each["results"][f"{case} resumed"][1] is None


def test_where_the_host_runs_ahead_of_the_device_all_stop_one_step_later(ranks):
    for each in ranks:
        assert each["results"]["lagging"][:2] == [4, "SIGTERM"]
        assert each["results"]["last"][:2] == [6, None]  # and nobody hangs when the answer comes after the end
        assert each["own"] == []  # Lightning has its broadcasts back


def test_a_term_to_one_rank_before_the_first_step_stops_all_after_it(ranks):
    for each in ranks:
        assert each["results"]["early"][:2] == [1, "SIGTERM"]


LAUNCHED = """
import sys, time
from lit_llm.callbacks import *

class Slow(Foreign):
    def training_step(self, batch, batch_idx):
        (OUT / f"pid-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

stop = StopOnSignal()
callbacks = [stop, StepCheckpoint(1000, monitor=None)]
trainer = make_trainer(callbacks, OUT, steps=3000, every=1000, strategy="ddp", devices=2, use_distributed_sampler=False)
trainer.fit(Slow(steps=3000))
report(trainer, step=trainer.global_step, stopped_by=stop.stopped_by, code=stop.exit_code)
sys.exit(stop.exit_code if stop.stopped_by else 0)
"""


def wait_for(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "whom", [pytest.param("parent", marks=pytest.mark.slow), pytest.param("group", marks=pytest.mark.soak)]
)
def test_signalled_from_outside_it_exits_with_75_and_leaves_nobody_behind(tmp_path, whom):
    script = tmp_path / "launched.py"
    script.write_text(
        "import json, os\nfrom pathlib import Path\nfrom foreign import *\n"
        f"OUT = Path({str(tmp_path)!r})\n"
        "def report(trainer, **values):\n"
        "    (OUT / f'report-{trainer.global_rank}.json').write_text(json.dumps(values))\n" + LAUNCHED
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([sys.executable, str(script)], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: all(p.exists() and p.read_text() for p in pids))
            if whom == "group":
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C in a terminal reaches every process
            else:
                process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 75, (tmp_path / "log").read_text()[-4000:]
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    assert reports[0]["step"] == reports[1]["step"] < 3000
    assert [each["code"] for each in reports] == [75, 0]
    assert {each["stopped_by"] for each in reports} == {"SIGINT" if whom == "group" else "SIGTERM"}
    assert os.readlink(tmp_path / "checkpoints" / "last.ckpt") == f"step-{reports[0]['step']:08d}.ckpt"
    wait_for(lambda: not Path(f"/proc/{pids[1].read_text()}").exists())
