"""A process of a run is killed: what the other one says. (That the run goes on from there exactly: tests/resume.)"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from ports import free_port

from lit_llm.training.lost_peer import is_lost_peer, is_port_in_use

DIES = """
import os, signal
from lightning.pytorch import Callback

class Dies(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == int(os.environ["DIES_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def fit(folder: Path, *flags: str, dies_at: int) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two processes, started as torchrun would."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(folder)]), "DIES_AT": str(dies_at)}
    command = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml", "--trainer.devices", "2", *flags]
    processes = [
        fork_server.Popen(
            command,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *said) for process, said in zip(processes, ended, strict=True)]


STEP_4 = (
    "the last checkpoint is {runs}/tiny/checkpoints/step-00000004.ckpt, continue with: {command} --run runs/tiny --resume auto"
)
NONE = "no checkpoint exists yet, start again with --resume auto"


@pytest.mark.parametrize(
    ("strategy", "dies_at", "what"),
    [
        ("{class_path: lit_llm.distributed.mesh_strategy.MeshStrategy}", 5, STEP_4),
        pytest.param("ddp", 1, NONE, marks=pytest.mark.slow),
    ],
)
def test_the_surviving_rank_names_the_last_checkpoint_and_how_to_continue(folder, strategy, dies_at, what):
    (folder / "dies.py").write_text(DIES)
    (folder / "dies.yaml").write_text("trainer:\n  callbacks+:\n  - class_path: dies.Dies\n")
    saved = ("--async_checkpoints", "false")  # a save in the background may be unfinished when the process dies
    flags = ("--config", "dies.yaml", "--trainer.strategy", strategy, *saved)
    (code, _, err), (killed, *_) = fit(folder, *flags, dies_at=dies_at)
    assert killed == -signal.SIGKILL and code == 1
    what = what.format(runs=folder.resolve() / "runs", command="python -m lit_llm fit")
    said = f"rank 0: rank 1 of this run ended. See its output for the reason; {what}"
    assert err.splitlines().count(said) == 1, err
    assert "Traceback" not in err and "GLHF" not in err


def test_no_other_error_is_taken_for_theirs():
    assert not is_lost_peer(ValueError("gloo/transport: Connection closed by peer"))
    assert not is_lost_peer(RuntimeError("Connection closed by peer"))  # of something else
    assert not is_port_in_use(OSError("EADDRINUSE"))


@pytest.mark.slow
def test_a_port_in_use_is_named(folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": root}
        command = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml", "--trainer.devices", "2"]
        ended = fork_server.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("error: ") == 1
    assert f"error: port {port} is in use by another process; choose another one (MASTER_PORT=N)" in ended.stderr
