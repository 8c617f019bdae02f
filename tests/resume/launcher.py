"""Runs `python -m lit_llm …` any number of times with a single import (about 8 s of CPU), from a server that forks.

The server imports everything and never trains. It forks every requested process, so each has the state of a fresh interpreter
after its imports. Several ranks of a run get the environment that torchrun gives them.

    with Launcher() as launcher:
        run = launcher.start(["fit", …], folder, ranks=2)         # returns at once
        run.signal(signal.SIGTERM, rank=1)
        assert run.wait() == [75, 75], run.said()
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for matrix.py as a script, which lacks the tests' folder
from ports import free_port

# Audit events of operations that change files or make them durable. Python raises the event before the operation.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


class Run:
    """One run: its processes (one process group) and their output."""

    def __init__(self, launcher: Launcher, pids: list[int], log: Path) -> None:
        self.launcher, self.pids, self.log = launcher, pids, log
        self.codes: list[int] | None = None

    def signal(self, signum: int, rank: int = 0) -> None:
        os.kill(self.pids[rank], signum)

    def signal_all(self, signum: int) -> None:
        """Send a signal to every process of the run, also to loader workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids[0], signum)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)

    def alive(self) -> bool:
        """Whether rank 0 is running."""
        return Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def wait(self, timeout: float = 240.0) -> list[int]:
        """Exit codes in rank order, negative for a signal. A process that hangs is killed, and raises an error."""
        if self.codes is None:
            answer = self.launcher.ask(wait=self.pids, timeout=timeout)
            self.codes = answer["codes"]
            assert not answer["hung"], f"still running after {timeout} s:\n{self.said()}"
        return self.codes

    def left(self, patience: float = 10.0) -> bool:
        """Whether processes of the run, loader workers among them, are still there after this many seconds."""
        return group_is_left(self.pids[0], patience)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def group_is_left(group: int, patience: float) -> bool:
    """Whether processes of a process group are still there after this many seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True


class Launcher:
    """The client side of the server.

    Args:
        folders: where runs find further modules.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders

    def __enter__(self) -> Launcher:
        path = os.pathsep.join(map(str, (Path(__file__).parents[2], *self.folders)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()  # the server kills remaining processes, and ends
        self.server.wait()

    def start(
        self,
        arguments: list[str],
        folder: Path,
        *,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        log: str = "log",
        die_at: int | None = None,
        bound: float | None = None,
    ) -> Run:
        """Start `python -m lit_llm ARGUMENTS` in `folder`. Its output is appended to `folder/log`.

        Args:
            ranks: 1: as from a shell; more: as torchrun starts them.
            env: added to the environment.
            die_at: SIGKILL for the whole run just before rank 0's operation number `die_at` = 1, 2, … on a checkpoint's files.
                0: never, but their number is written to `folder/operations`.
            bound: seconds that the end of a process may take, instead of those of `bounded_exit`.
        """
        order = {"arguments": arguments, "folder": str(folder), "log": log, "env": env or {}, "die_at": die_at, "bound": bound}
        answer = self.ask(start=order, ranks=ranks, port=free_port())
        return Run(self, answer["pids"], folder / log)

    def run(self, arguments: list[str], folder: Path, **options: Any) -> Run:
        """Start, and wait for the end."""
        run = self.start(arguments, folder, **options)
        run.wait()
        return run

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        line = self.server.stdout.readline()
        assert line, "the launcher's server is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- the server ---------------------------------------------------------------------------------------------------------


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import lit_llm.cli.bounded_exit  # first, as in a process of its own: its exit handler is the last
    import lit_llm.cli.build
    import lit_llm.runs.comparison
    import lit_llm.training.fit
    import lit_llm.training.sample_ledger  # noqa: F401  # what a run imports before it does anything
    from lit_llm.cli.resolved_config import resolved

    resolved([])  # fills the parser's caches, which halves the remaining start time

    groups: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = wait_for(order["wait"], order["timeout"])
            if not exists(order["wait"][0]):  # nothing of the run is left: another group may get its number from now on
                groups.discard(order["wait"][0])
        else:
            pids: list[int] = []
            for rank in range(order["ranks"]):
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    become(rank, order["ranks"], order["port"], pids, **order["start"])
                pids.append(pid)
                os.setpgid(pid, pids[0])  # in parent and child, because either may run first
            groups.add(pids[0])
            answer = {"pids": pids}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(pids: list[int], timeout: float) -> dict[str, Any]:
    codes: dict[int, int] = {}
    end, hung = time.monotonic() + timeout, False
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        if time.monotonic() > end and not hung:
            hung = True
            os.killpg(pids[0], signal.SIGKILL)
        time.sleep(0.005)
    return {"codes": [codes[pid] for pid in pids], "hung": hung}


def become(
    rank: int,
    ranks: int,
    port: int,
    before: list[int],
    *,
    arguments: list[str],
    folder: str,
    log: str,
    env: dict[str, str],
    die_at: int | None,
    bound: float | None,
) -> NoReturn:
    """In the fork: run `python -m lit_llm ARGUMENTS`. The caller's interpreter then ends as that of the command would."""
    os.setpgid(0, before[0] if before else 0)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    if ranks > 1:
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        os.environ.update({name: str(value) for name, value in (torchrun | address).items()})
    os.environ.update(env)
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # was read from the environment at import
    if die_at is not None and rank == 0:
        count_operations(die_at)
    from lit_llm.__main__ import main
    from lit_llm.cli import bounded_exit

    if bound is not None:
        bounded_exit.SECONDS = bound
    bounded_exit.run_and_end(
        lambda: main(arguments)
    )  # raises SystemExit or the command's exception, which the interpreter ends with


def count_operations(die_at: int) -> None:
    """Count operations on checkpoint files, and kill the run before number `die_at`."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS and ".ckpt" in str(args[0]):
            count += 1
            if count == die_at:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)
    if die_at == 0:
        atexit.register(lambda: Path("operations").write_text(str(count)))


if __name__ == "__main__":
    serve()
