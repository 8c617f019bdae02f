"""A run that makes no progress ends on every rank, and names the rank that is behind; slow work is no hang."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ports import free_port

from lit_llm.training.progress_judge import LONG, Judge, Place
from lit_llm.training.progress_watch import ProgressWatch

START = Place(1, 10, 100, step=3, micro_batch=1, micro_batches=2, hook="forward")


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def told(changes: dict[int, dict], *, beating=(0, 1, 2), silence=3.0):
    """The verdict after 20 s in which each rank is where `changes` put it, and only some beat."""
    clock = Clock()
    judge = Judge(10.0, silence, clock)
    places = {rank: START._replace(**changes.get(rank, {})) for rank in (0, 1, 2)}
    for second in range(21):
        clock.seconds = float(second)
        for rank in beating if second else places:
            judge.hear(rank, places[rank]._replace(beat=second + 2))
        if second <= 10:
            assert judge.verdict() is None or second == 10
    return judge.verdict()


AHEAD = {"hooks": 11, "hook": "backward"}


def test_the_rank_with_the_fewest_hooks_is_behind():
    rank, said = told({0: AHEAD, 2: AHEAD})
    assert rank == 1
    assert said == (
        "the run has made no progress for 10 s: rank 1 is behind, in step 3, micro-batch 1 of 2, forward (--hang_timeout)"
    )


def test_of_ranks_at_the_same_hook_the_one_with_fewer_collectives_is_behind():
    assert told({0: {"collectives": 101}, 2: {"collectives": 101}})[0] == 1


@pytest.mark.parametrize("hook", LONG)
def test_a_rank_that_works_for_long_without_hooks_is_not_behind_unless_it_is_silent(hook):
    assert told({0: AHEAD, 1: {"hook": hook}, 2: AHEAD}) is None
    assert told({1: {"hook": hook}}, beating=(0, 2))[0] == 1


def test_a_rank_without_beats_is_named_although_its_last_place_is_ahead():
    rank, said = told({1: {"hooks": 12}}, beating=(0, 2))
    assert rank == 1
    assert "rank 1 does not answer (stopped, dead, or its machine is lost); it was last in step 3" in said


def test_ranks_that_all_wait_at_the_same_place_are_named_together():
    assert "no rank is behind the others, all are in step 3" in told({})[1]


def test_a_place_has_the_step_that_is_made_and_the_micro_batch_within_it(tmp_path):
    """Of each step, both from 1; a validation has batches of its own."""
    watch, said = ProgressWatch(10.0, tmp_path), []

    class Asks(Callback):
        def on_train_batch_start(self, *_):
            said.append(str(watch.place()))

        on_before_optimizer_step = on_train_batch_end = on_validation_batch_start = on_train_batch_start

    assert str(watch.place()) == "step 0, setup"
    trainer = {"max_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 4, "limit_val_batches": 2}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    plain = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    Trainer(callbacks=[watch, Asks()], **trainer, **quiet, **plain).fit(BoringModel())
    assert said == [
        "step 1, micro-batch 1 of 2, first step",
        "step 1, micro-batch 1 of 2, first step",
        "step 1, micro-batch 2 of 2, first step",
        "step 1, micro-batch 2 of 2, first step",
        "step 1, micro-batch 2 of 2, end of the micro-batch",
        "step 2, micro-batch 1 of 2, forward",
        "step 2, micro-batch 1 of 2, end of the micro-batch",
        "step 2, micro-batch 2 of 2, forward",
        "step 2, micro-batch 2 of 2, optimizer step",
        "step 2, micro-batch 2 of 2, end of the micro-batch",
        "step 2, micro-batch 2 of 2, validation batch 1",
        "step 2, micro-batch 2 of 2, validation batch 2",
    ]


@pytest.mark.parametrize("name", ["hooks", "collectives"])
def test_whatever_goes_on_on_one_rank_is_progress_of_the_run(name):
    clock = Clock()
    judge = Judge(10.0, 3.0, clock)
    for second in range(60):
        clock.seconds = float(second)
        judge.hear(0, START._replace(beat=second))
        judge.hear(1, START._replace(beat=second, **{name: getattr(START, name) + second // 9}))
        assert judge.verdict() is None


FAULTS = """
import os, signal, time
from lightning.pytorch import Callback

KIND, RANK = os.environ["FAULT"].split()

class Fault(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == int(RANK) and trainer.global_step == 2:
            if KIND == "sleeps":
                time.sleep(1000)
            elif KIND == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if KIND == "slow":
            time.sleep(2.0)  # each batch; 4 of them are longer than the timeout
"""
CALLBACK = "trainer:\n  callbacks+:\n  - class_path: faults.Fault\n"


def fit(folder: Path, fault: str, *flags: str, ranks: int = 2, timeout: float = 5.0) -> dict[int, tuple[int | None, str]]:
    """Exit code (None: it had to be killed) and errors of each process, started as torchrun would. Logs are in logs/."""
    (folder / "faults.py").write_text(FAULTS)
    (folder / "fault.yaml").write_text(CALLBACK)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "run", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(folder)]), "FAULT": fault}
    command = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml", "--config", "fault.yaml", "--log_dir", "logs"]
    command += ["--trainer.devices", str(ranks), "--hang_timeout", str(timeout), *flags]
    processes = [
        fork_server.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    kind, guilty = fault.split()
    stopped = int(guilty) if kind == "stops" else None
    try:
        deadline, ended = time.monotonic() + 240, {}
        for rank, process in enumerate(processes):
            if rank != stopped:
                ended[rank] = process.communicate(timeout=deadline - time.monotonic())[1]
        if stopped is not None:
            assert processes[stopped].poll() is None
            processes[stopped].kill()
            ended[stopped] = processes[stopped].communicate()[1]
    finally:
        for process in processes:
            process.kill()
    logs = {rank: (folder / "logs" / f"rank-{rank}.log").read_text(errors="replace") for rank in range(ranks)}
    assert set(ended[0].splitlines()) <= set(logs[0].splitlines()), "the terminal shows what the log has"
    return {rank: (None if rank == stopped else process.returncode, logs[rank]) for rank, process in enumerate(processes)}


TP = "{class_path: lit_llm.distributed.mesh_strategy.MeshStrategy, init_args: {shard: 2, tensor_parallel: 2}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guilty", "ranks", "strategy"),
    [pytest.param(1, 2, "ddp", id="rank 1 of 2", marks=pytest.mark.soak), pytest.param(3, 4, TP, id="rank 3 of 4")],
)
def test_a_rank_that_sleeps_is_named_on_all(folder, guilty, ranks, strategy):
    ended = fit(folder, f"sleeps {guilty}", "--trainer.strategy", strategy, ranks=ranks)
    for rank, (code, log) in ended.items():
        said = (
            rf"^error: rank {rank}: the run has made no progress for 5 s: rank {guilty} is behind, in step 3, micro-batch 1 "
            r"of 1, forward, after gloo:\w+ of \S+ \(finished\) \(--hang_timeout\)$"
        )
        assert code == 1 and len(re.findall(said, log, re.MULTILINE)) == 1, log
        assert ('faults.py", line 11 in on_train_batch_start' in log) == (rank == guilty), "its stack"
        assert (folder / "logs" / f"collectives-rank-{rank}.json").stat().st_size > 100


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [pytest.param(1, marks=pytest.mark.soak), 0])
def test_a_process_that_has_been_stopped_is_named_on_the_others(folder, guilty):
    ended = fit(folder, f"stops {guilty}")
    code, log = ended[1 - guilty]
    said = f"error: rank {1 - guilty}: the run has made no progress for 5 s: rank {guilty} does not answer"
    assert code == 1 and log.count(said) == 1, log


@pytest.mark.slow
def test_slow_validation_is_no_hang(folder):
    slow = fit(folder, "slow 0", "--run_dir", "runs/slow", "--trainer.limit_val_batches", "4", timeout=6.0)
    assert [code for code, _ in slow.values()] == [0, 0], slow
