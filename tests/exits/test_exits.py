"""Every way to end a run ends its processes: by themselves, with the right exit code, and with no process left.

A watchdog ends a process that has not ended 20 seconds after its command. Except where it is tested, no case may need it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import fork_server
import pytest
from exit_faults import overlay
from launcher import group_is_left
from recipe_runs import TEXT

from lit_llm.checkpoint.disk_format import damage

LIMIT = 60.0
"""Seconds after which an exit counts as a hang. An exit takes about one."""
WATCHDOG = "had not ended"
RECIPE = """
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 2}}
validation: {every_n_steps: 3}
checkpoint: {every_n_steps: 3}
trainer: {max_steps: 6, log_every_n_steps: 1, accelerator: cpu}
"""


class Exit(NamedTuple):
    """A run that ends early. On two ranks, `kind` happens on rank 1 only."""

    kind: str
    place: str
    code: int
    others: int = 1
    """The exit code of the other rank."""
    flags: tuple[str, ...] = ()


MONITOR = ("--checkpoint.monitor", "nope")
EXITS = [
    Exit("KeyError", "setup", 1),
    Exit("KeyError", "training", 1),
    Exit("KeyError", "validation", 1),
    Exit("KeyError", "save", 1),
    Exit("KeyError", "teardown", 1, 0),  # the other rank has done everything
    Exit("KeyError", "reading", 1),
    Exit("UserError", "training", 2),
    Exit("OSError", "validation", 1),
    Exit("MemoryError", "training", 1),
    Exit("SystemExit", "validation", 130),
    Exit("KeyboardInterrupt", "training", 130),
    Exit("SIGINT twice", "training", 130),
    Exit("SIGINT", "training", 75, 75),
    Exit("SIGTERM", "validation", 75, 75),
    Exit("SIGUSR1", "validation", 75, 75),
    Exit("SIGKILL", "validation", -signal.SIGKILL),
    Exit("nothing", "monitor", 2, 2, MONITOR),
    Exit("nothing", "end", 0, 0),
]
QUICK = (("nothing", "monitor"), ("KeyError", "validation"))
ALONE = {"UserError", "OSError", "MemoryError", "SIGUSR1"}
"""Kinds on one rank. The others are on two, where the rank that fails ends as it does alone."""


SAID = {
    "monitor": "error: StepCheckpoint monitors 'nope'",
    "KeyError": "KeyError: 'broken'",
    "OSError": "Input/output error",
    "MemoryError": "there is not enough memory",
    "end": "reached trainer.max_steps=6",
    **{name: f"stopped by {name} after step" for name in ("SIGINT", "SIGTERM", "SIGUSR1")},
}
"""What a place or a kind prints."""


def cases():
    for exit in EXITS:
        quick = (exit.kind, exit.place) in QUICK
        alone = exit.kind in ALONE or exit.place == "monitor"
        yield pytest.param(exit, 1 if alone else 2, id=f"{exit.kind}, {exit.place}", marks=() if quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def end(launcher, folder, kind, place, *flags, workers=0, ranks=1, rank=0, bound=None, also=()):
    """Exit codes and output of a run that fails or ends. A hang is an error of the launcher."""
    name = f"{abs(hash((kind, place, flags, workers, ranks, rank, str(also))))}"
    more = overlay(folder, f"{name}.yaml", *also, ("Fault", {"place": place, "kind": kind, "rank": rank}))
    words = ["fit", "--config", "tiny.yaml", *more, "--run_dir", f"runs/{name}", *flags]
    words += ["--data.num_workers", str(workers), "--trainer.devices", str(ranks)]
    run = launcher.start(words, folder, ranks=ranks, log=f"{name}.log", bound=bound)
    codes = run.wait(LIMIT)
    assert not run.left(), f"a process of the run is left:\n{run.said()}"
    return codes, run.said()


@pytest.mark.parametrize(("exit", "ranks"), list(cases()))
def test_a_run_ends_by_itself_with_its_exit_code_and_leaves_no_process(launcher, folder, exit, ranks):
    codes, said = end(launcher, folder, exit.kind, exit.place, *exit.flags, workers=1, ranks=ranks, rank=ranks - 1)
    assert codes == [exit.others] * (ranks - 1) + [exit.code], said
    assert SAID.get(exit.place, SAID.get(exit.kind, "")) in said
    assert WATCHDOG not in said


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_deleted_run_folder_and_a_killed_worker(launcher, folder, workers):
    codes, said = end(launcher, folder, "the folder is deleted", "training", workers=workers)
    assert codes == [0] and "TensorBoardLogger cannot write: No such file" in said, said  # saves make the folder again
    if workers:
        codes, said = end(launcher, folder, "a worker is killed", "validation", workers=workers)
        assert codes == [1] and "RuntimeError: DataLoader worker (pid" in said, said
    assert WATCHDOG not in said


@pytest.mark.parametrize(
    ("until", "code", "says"),
    [
        pytest.param("training", 0, "training ended after step 6", marks=pytest.mark.slow),
        ("teardown", 1, "error: the last checkpoint, after step 6, could not be saved"),
    ],
)
def test_a_disk_that_is_full_for_every_file_of_the_process(launcher, folder, until, code, says):
    """Events, checkpoints and the output of the process itself, which is a file here. From step 4 until step 5, or the end."""
    room = ("Fault", {"place": until, "kind": "the disk has room", "step": 4})
    codes, said = end(launcher, folder, "the disk is full", "training", also=[room])
    assert codes == [code] and says in said and "Traceback" not in said, said
    assert said.startswith("model: ") and "step 4/6" not in said


@pytest.mark.slow
def test_a_checkpoint_in_the_background_is_complete_although_the_command_has_failed(launcher, folder):
    flags = ("--async_checkpoints", "true", "--run_dir", "runs/slow")
    codes, said = end(launcher, folder, "KeyError", "training", *flags, bound=0.2, also=[("SlowSaves", {})])
    assert codes == [1] and WATCHDOG not in said
    assert damage(folder / "runs" / "slow" / "checkpoints" / "step-00000003.ckpt") is None


def test_a_thread_that_does_not_end_is_named_and_ended(launcher, folder):
    codes, said = end(launcher, folder, "KeyError, and a thread stays", "validation", bound=0.5)
    assert codes == [1] and "KeyError: 'broken'" in said
    (line,) = [line for line in said.splitlines() if WATCHDOG in line]
    assert "thread stuck-thread" in line


@pytest.mark.slow
def test_ranks_that_wait_for_a_rank_0_that_refuses_the_settings_are_released(launcher, folder):
    """Nobody else ends them here: no torchrun, and no Lightning that starts them."""
    flags = ("--run_dir", "runs/twice", "--trainer.max_steps", "2")
    assert end(launcher, folder, "nothing", "twice", *flags)[0] == [0]
    codes, said = end(launcher, folder, "nothing", "twice", *flags, ranks=2)
    assert codes == [2, 2] and said.count("error: run folder runs/twice already holds a run") == 1 and "Traceback" not in said


def launched(folder, name, *faults):
    """Exit code and output of a run of two ranks, the second of which Lightning starts. No process stays."""
    words = ["fit", "--config", "tiny.yaml", *overlay(folder, f"{name}.yaml", *faults), "--run_dir", f"runs/{name}"]
    words += ["--data.num_workers", "1", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    path = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent)))
    with open(folder / f"{name}.log", "w") as log:
        process = fork_server.Popen(
            [sys.executable, "-m", "lit_llm", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(120)
            assert not group_is_left(process.pid, LIMIT), (folder / f"{name}.log").read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return code, (folder / f"{name}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [pytest.param("KeyError", marks=pytest.mark.soak), "KeyError, and the other rank sleeps"])
def test_processes_that_lightning_starts_do_not_stay_behind(folder, rank, kind):
    """Rank 0 starts rank 1."""
    faults = [("Fault", {"place": "training", "kind": "KeyError", "rank": rank})]
    if "sleeps" in kind:
        faults += [("Fault", {"place": "training", "kind": "sleeps", "rank": 1 - rank})]
    code, said = launched(folder, f"lightning-{rank}-{len(kind)}", *faults)
    assert code == 1 and "KeyError: 'broken'" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place", "code", "says"),
    [
        ("UserError", "start", 2, "error: rank 1: a setting does not fit (--a.key)"),
        ("SIGKILL", "start", 1, "error: rank 1 was ended by signal 9"),
        ("SIGKILL", "training", 1, "error: rank 1 was ended by signal 9"),
    ],
)
def test_rank_0_names_a_rank_that_lightning_has_started_and_that_refuses_or_dies(folder, kind, place, code, says):
    ended, said = launched(folder, f"{kind}-{place}", ("Fault", {"place": place, "kind": kind, "rank": 1}))
    assert ended == code and said.count(says) == 1, said


FAILS = """
from lit_llm.training import bounded_exit
from lit_llm.core.errors import report

def command():
    report("a mistake")
    print("failed", flush=True)
    return 2

bounded_exit.FIRST_RANK_SECONDS = {seconds}
bounded_exit.run_and_end(command)
"""


@pytest.mark.parametrize("also_ends", [True, False])
def test_a_rank_that_fails_leaves_the_last_word_to_rank_0(also_ends):
    """torchrun ends all ranks when one has failed. Rank 0 listens and prints the mistake; another one only if it goes on."""
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        rank_0.settimeout(60)
        variables = {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank_0.getsockname()[1])}
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
        script = FAILS.format(seconds=1000 if also_ends else 0.1)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", script], env=env, **pipes) as other:
            connection = rank_0.accept()[0]
            if also_ends:
                time.sleep(0.5)
                assert other.poll() is None, "it must not end before rank 0"
                connection.close()
            said = other.communicate()[1]
        assert other.returncode == 2 and said == ("" if also_ends else "error: a mistake\n")


def test_a_rank_whose_launcher_ended_before_it_looked_ends_too():
    """Rank 0 may end while rank 1 still imports."""
    script = "import time; import lit_llm.training.bounded_exit as b; b.SECONDS = 0.1; b.end_with_launcher(); time.sleep(9)"
    env = {**os.environ, "LIT_LLM_LAUNCHER": "1234567", "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = fork_server.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert ended.returncode == 1 and "process 1234567, which launched this rank, has ended" in ended.stderr
