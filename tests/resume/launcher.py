"""Runs `python -m lit_llm …` in forks (fork_server.py), on one rank or several, with the environment that torchrun gives them.

launcher = Launcher()
run = launcher.start(["fit", …], folder, ranks=2)         # returns at once
run.signal(signal.SIGTERM, rank=1)
assert run.wait() == [75, 75], run.said()
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for scripts, which lack the tests' folder
import fork_server
from ports import free_port

# Audit events of operations that change files or make them durable. Python raises the event before the operation.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


class Run:
    """One run: its processes (one process group) and their output."""

    def __init__(self, processes: list[fork_server.Popen], log: Path) -> None:
        self.processes, self.log = processes, log
        self.group = processes[0].pid

    def signal(self, signum: int, rank: int = 0) -> None:
        self.processes[rank].send_signal(signum)

    def signal_all(self, signum: int) -> None:
        """Send a signal to every process of the run, also to loader workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signum)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)

    def alive(self) -> bool:
        """Whether rank 0 is running."""
        return self.processes[0].poll() is None

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def wait(self, timeout: float = 240.0) -> list[int]:
        """Exit codes in rank order, negative for a signal. A process that hangs is killed, and raises an error."""
        end = time.monotonic() + timeout
        try:
            return [process.wait(max(0.0, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.said()}") from None

    def left(self, patience: float = 10.0) -> bool:
        """Whether processes of the run, loader workers among them, are still there after this many seconds."""
        return group_is_left(self.group, patience)

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
    """Starts runs.

    Args:
        folders: where runs find further modules, besides those of the tests and of this folder.
    """

    def __init__(self, *folders: Path) -> None:
        here = Path(__file__).resolve()
        self.path = os.pathsep.join(map(str, (here.parents[2], here.parents[1], here.parent, *folders)))

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
        common = {"PYTHONPATH": self.path}
        if ranks > 1:
            sizes = {"GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "test"}
            common |= {name: str(value) for name, value in (sizes | address).items()}
        processes: list[fork_server.Popen] = []
        with open(folder / log, "ab") as file:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                words = ["-m", "lit_llm"]
                if bound is not None or (die_at is not None and rank == 0):
                    words = [__file__, str(bound), str(None if rank else die_at)]
                processes.append(
                    fork_server.Popen(
                        [sys.executable, *words, *arguments],
                        env=os.environ | common | own | (env or {}),
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        process_group=processes[0].pid if processes else 0,
                    )
                )
        return Run(processes, folder / log)

    def run(self, arguments: list[str], folder: Path, **options: Any) -> Run:
        """Start, and wait for the end."""
        run = self.start(arguments, folder, **options)
        run.wait()
        return run


# -- in the process -----------------------------------------------------------------------------------------------------


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


def main(bound: str, die_at: str, arguments: list[str]) -> None:
    from lit_llm import __main__
    from lit_llm.training import bounded_exit

    if die_at != "None":
        count_operations(int(die_at))
    if bound != "None":
        bounded_exit.SECONDS = float(bound)
    bounded_exit.run_and_end(lambda: __main__.main(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:3], sys.argv[3:])
