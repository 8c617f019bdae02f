"""Signals to a run of the command line: exit codes, no process remains, and the run continues like an uninterrupted one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import matrix
import pytest
from launcher import Launcher, Run
from matrix import Cell
from ports import free_port
from run_comparison import differences
from victims import overlay

SINGLE, DDP = Cell("1 single", 1, 0, 0.2, "32-true"), Cell("2 ddp", 2, 0, 0.2, "32-true")
STAGES = Cell("2 pp", 2, 0, 0.2, "32-true")


@pytest.fixture(scope="module")
def straight(launcher, folder):
    """{cell: its uninterrupted run}, made on first use."""
    known: dict[Cell, Path] = {}

    def run(cell: Cell) -> Path:
        if cell not in known:
            matrix.run_straight(launcher, cell, folder)
            known[cell] = folder / cell.straight
        return known[cell]

    return run


def eventually(condition: Callable[[], object], alive: Callable[[], bool] = lambda: True, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and alive(), "waited in vain"
        time.sleep(0.01)


STOPPING = ": stopping after this optimizer step"


def held(folder: Path) -> tuple[list[str], Path]:
    """Flags that pause a run in its sixth step (no validation follows the fifth), and the file to delete to continue."""
    hold = folder / "hold"
    hold.touch()
    return overlay(folder, "hold.yaml", ("Hold", {"step": 6, "file": str(hold)})), hold


def start_held(launcher: Launcher, folder: Path, cell: Cell, name: str, **options) -> tuple[Run, Path]:
    """A run paused in its sixth step, and the file that pauses it."""
    flags, hold = held(folder)
    run = launcher.start(matrix.fit(cell, name, *flags), folder, ranks=cell.ranks, log=f"{name}.log", **options)
    eventually(lambda: run.log.exists() and re.search(r"^step +5/", run.said(), re.M), run.alive)
    return run, hold


def goes_on(launcher: Launcher, folder: Path, cell: Cell, name: str, straight: Path, **options) -> None:
    run = launcher.run(matrix.fit(cell, name), folder, ranks=cell.ranks, log=f"{name}.log", **options)
    assert set(run.codes) == {0}, run.said()
    rows, found = differences(straight, folder / name)
    assert found == [] and sum(count for _, count, _ in rows) > 400


def stopped_at(run: Run, folder: Path, name: str, by: str) -> int:
    """The step at which a run reports its stop, once. It must be the last one saved."""
    said = re.findall(rf"^stopped by {by} after step (\d+); continue with: python -m lit_llm fit --run {name} --resume auto$",
                      run.said(), re.M)  # fmt: skip
    assert len(said) == 1, run.said()
    assert os.readlink(folder / name / "checkpoints" / "last.ckpt") == f"step-{int(said[0]):08d}.ckpt"
    return int(said[0])


@pytest.mark.parametrize(
    ("cell", "signum", "rank"),
    [
        (DDP, signal.SIGTERM, 1),
        pytest.param(STAGES, signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(DDP, signal.SIGUSR1, 0, marks=pytest.mark.soak),
        pytest.param(DDP, signal.SIGINT, None, id="Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_rank_stops_all_with_75_and_the_run_continues_exactly(launcher, folder, straight, cell, signum, rank):
    name = f"{cell.straight}-{signum.name}-{rank}"
    run, hold = start_held(launcher, folder, cell, name)
    run.signal_all(signum) if rank is None else run.signal(signum, rank)
    eventually(lambda: run.said().count(STOPPING) == (2 if rank is None else 1), run.alive)
    hold.unlink()
    assert run.wait() == [75, 75], run.said()
    assert 5 <= stopped_at(run, folder, name, signum.name) < matrix.STEPS
    goes_on(launcher, folder, cell, name, straight(cell))


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, pytest.param(matrix.STEPS, marks=pytest.mark.soak, id="last")])
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(SINGLE, id="one"),
        pytest.param(DDP, id="two", marks=pytest.mark.soak),
        pytest.param(STAGES, id="stages"),
    ],
)
def test_a_signal_during_validation_exits_with_75_before_its_next_batch_and_the_resumed_run_makes_all_of_it(
    launcher, folder, straight, cell, step
):
    name = f"validating-{cell.straight}-{step}"
    slow = overlay(folder, f"{name}.yaml", ("SlowValidation", {"seconds": 2.0, "step": step, "file": f"{name}-batches"}))
    run = launcher.start(matrix.fit(cell, name, *slow), folder, ranks=cell.ranks, log=f"{name}.log")
    notes = [folder / f"{name}-batches-{rank}" for rank in range(cell.ranks)]
    eventually(lambda: all(note.exists() and f"{step} 0" in note.read_text() for note in notes), run.alive)
    run.signal(signal.SIGTERM, cell.ranks - 1)
    assert run.wait(60) == [75] * cell.ranks, run.said()
    for note in notes:
        batches = note.read_text().splitlines()
        assert batches[-1] == f"{step} 0" and "4 1" in batches  # a complete validation has more
    assert stopped_at(run, folder, name, "SIGTERM") == step
    goes_on(launcher, folder, cell, name, straight(cell))


@pytest.mark.parametrize(
    "cell", [pytest.param(SINGLE, id="one", marks=pytest.mark.slow), pytest.param(DDP, id="two", marks=pytest.mark.soak)]
)
def test_a_second_interrupt_exits_at_once_with_130_and_the_run_continues_from_its_last_checkpoint(
    launcher, folder, straight, cell
):
    name = f"twice-{cell.ranks}"
    run, hold = start_held(launcher, folder, cell, name)
    run.signal_all(signal.SIGINT)
    eventually(lambda: run.said().count(f"SIGINT{STOPPING}") == cell.ranks, run.alive)
    run.signal_all(signal.SIGINT)
    assert hold.exists()  # it ends in the middle of its step
    assert run.wait() == [130] * cell.ranks, run.said()
    assert "Traceback" not in run.said() and "stopped by" not in run.said()
    goes_on(launcher, folder, cell, name, straight(cell))


SLURM = {
    **{"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"},
}


@pytest.fixture
def slurm(folder):
    """The environment of a SLURM task. A requeue request would leave a mark."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("scontrol", "srun"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\necho $0 $* >> {folder}/asked\n")
        (folder / "bin" / name).chmod(0o755)
    return SLURM | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_task_preempted_by_slurm_saves_between_two_steps_and_leaves_the_requeue_to_slurm(
    launcher, folder, straight, slurm, signum
):
    name = f"slurm-{signum.name}"
    run, hold = start_held(launcher, folder, SINGLE, name, env=slurm)
    run.signal(signum)
    eventually(lambda: run.said().count(STOPPING) == 1, run.alive)
    hold.unlink()
    assert run.wait() == [75], run.said()
    stopped_at(run, folder, name, signum.name)
    assert not (folder / "asked").exists() and not list((folder / name).rglob("hpc_ckpt*"))
    goes_on(launcher, folder, SINGLE, name, straight(SINGLE), env=slurm)


@pytest.mark.slow
def test_torchrun_within_a_slurm_job_is_torchrun(launcher, folder, straight, slurm):
    name = "slurm-torchrun"
    goes_on(launcher, folder, DDP, name, straight(DDP), env=slurm)  # two ranks, although the job has one task
