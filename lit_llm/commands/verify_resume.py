"""`python -m lit_llm verify-resume`: compare an interrupted run of a recipe with an uninterrupted one, bit for bit.

It makes three runs in a temporary folder: an uninterrupted run; a run that is interrupted at a random step; and its
continuation with `--resume auto`. The interruption is a SIGTERM, or with `--kill` a SIGKILL to all processes of the run. Then
it compares every logged number, the ids of every sample in the order of every rank, and every value in the last checkpoints.

All flags of `fit` are passed on, such as `--trainer.devices 2 --trainer.strategy ddp`. The runs end after `--steps` steps, with
the schedule of the whole recipe. Two settings are fixed: trainer.log_every_n_steps is 1, and with `--kill`
checkpoint.every_n_steps is a fifth of the steps, so that a checkpoint exists when the run is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_llm.commands.launch import launch as launch_command
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import HELP, Arguments, read
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import whole

LEDGER_CLASS = "lit_llm.training.sample_ledger.SampleLedger"
_POLL_SECONDS = 0.002


def fit(
    arguments: list[str], run: Path, ledger: dict[str, Any], extra: list[str], kill_now: Callable[[], bool] | None = None
) -> int:
    """Run `fit` with a ledger until it ends or is killed; returns its exit code. Its output goes to `<run>.log`.

    Args:
        ledger: arguments of the SampleLedger.
        kill_now: called repeatedly; the run is killed when it returns True. None: never.
    """
    # A flag, because flags may also set the callbacks, and they come after all files.
    added = ["--trainer.callbacks+", json.dumps([{"class_path": LEDGER_CLASS, "init_args": ledger}])]
    words = ["fit", *arguments, *added, "--run_dir", str(run), *extra]
    return launch(words, run.parent / f"{run.name}.log", kill_now)


def launch(arguments: list[str], log: Path, kill_now: Callable[[], bool] | None = None) -> int:
    """Run `python -m lit_llm ARGUMENTS` as a process group; returns its exit code."""
    command = [sys.executable, "-m", "lit_llm", *arguments]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while kill_now is not None and process.poll() is None:
                if kill_now():
                    os.killpg(process.pid, signal.SIGKILL)  # also other ranks and loader workers
                    break
                time.sleep(_POLL_SECONDS)
            return process.wait()
        except BaseException:  # Ctrl-C reaches this process only
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


@dataclass
class KillInStep:
    """Returns True when a run is to be killed: a delay after a step began, or at the end of training if that comes first.

    Args:
        ledger: the ledger file of rank 0.
        step: the optimizer step, 1, 2, …
        delay: the time to wait, in durations of the previous step.
    """

    ledger: Path
    step: int
    delay: float
    _previous: float | None = None
    _begun: float | None = None

    def __call__(self) -> bool:
        from lit_llm.runs.comparison import FINISHED

        step = last_step(self.ledger)
        now = time.monotonic()
        if step == FINISHED:
            return True
        if step == self.step - 1 and self._previous is None:
            self._previous = now
        if step >= self.step and self._begun is None:
            self._begun = now
        return self._begun is not None and now - self._begun >= self.delay * (self._begun - (self._previous or self._begun))


def last_step(ledger: Path) -> int:
    """The step in the last complete line of a ledger; 0 if it has none."""
    lines = ledger.read_text().rpartition("\n")[0].splitlines() if ledger.exists() else []
    return int(json.loads(lines[-1])[0]) if lines else 0


def error_of(run: Path) -> str:
    """The error lines of a failed run, or the end of its output."""
    output = (run.parent / f"{run.name}.log").read_text()
    errors = [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]
    return "\n".join(errors) or output[-2000:].strip()


def own_flags() -> OwnFlags:
    """The flags that `verify-resume` adds to those of `fit`."""
    flags = OwnFlags(prog="python -m lit_llm verify-resume")
    flags.add_argument("--steps", type=int, range=whole(2), default=20)  # an interrupted run needs two
    flags.add_argument("--kill", type=bool)
    return flags


def main(words: list[str]) -> int:
    """Print a certificate, or the first difference and its likely cause. Returns 0 if the runs are equal, else 1.

    Raises:
        UserError: The recipe does not run. The message is that of `fit`.
    """
    own, rest = own_flags().split(words)
    arguments = read(rest)
    if arguments.asks_for(*HELP):
        print(f"usage: python -m lit_llm verify-resume --config RECIPE [--steps N] [--kill] [any flag of fit]\n\n{__doc__}")
        return 0
    for flag in ("run_dir", "resume", "replace"):
        if arguments.asks_for(flag):
            raise UserError(f"verify-resume uses its own folders: remove --{flag}")
    return launch_command("fit", rest, lambda checked: _verify(checked, rest, steps=own.steps, kill=own.kill))


def _verify(arguments: Arguments, words: list[str], *, steps: int, kill: bool) -> int:
    from lit_llm.runs.comparison import LEDGER, differences, ledger

    extra = ["--trainer.log_every_n_steps", "1"]
    if kill:
        extra += ["--checkpoint.every_n_steps", str(max(1, steps // 5))]
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        straight, interrupted = Path(folder) / "straight", Path(folder) / "interrupted"
        if arguments.reported:
            _find_other_mistakes(arguments, straight)
        if fit(words, straight, {"stop_after": steps}, extra) != 0:
            raise UserError(error_of(straight))
        if (made := max(ledger(straight))) < steps:
            raise UserError(f"the recipe ends after {made} steps: use --steps {made}, or raise --trainer.max_steps")
        # Kill after the first save. Send SIGTERM before the last step, because the run ends after that step in any case.
        first, last = (steps // 5 + 2, steps) if kill else (1, steps - 1)
        step = random.randint(min(first, last), last)
        if kill:
            kill_now = KillInStep(interrupted / LEDGER.format(0), step, random.random())
            code = fit(words, interrupted, {"stop_after": steps, "wait_at_end": True}, extra, kill_now)
            step = max(ledger(interrupted), default=step)  # a later step, if steps are shorter than the poll interval
        else:
            code = fit(words, interrupted, {"stop_after": steps, "terminate_in": step}, extra)
        print(f"interrupted in step {step} of {steps} by {'SIGKILL' if kill else 'SIGTERM'}: exit code {code}")
        if code != (-signal.SIGKILL if kill else 75):
            raise UserError(error_of(interrupted))
        if fit(words, interrupted, {"stop_after": steps}, [*extra, "--resume", "auto"]) != 0:
            raise UserError(error_of(interrupted))
        resumed = re.search(r"^resume: from step (\d+)", (Path(folder) / "interrupted.log").read_text(), re.M)
        if resumed is None:
            raise UserError("the interrupted run saved no checkpoint: set --checkpoint")
        rows, found = differences(straight, interrupted)
    print(f"continued from step {resumed[1]}")
    for name, count, different in rows:
        print(f"  {name:32s} {count:6d} compared, {different} differ")
    if found:
        print("NOT the same run:\n  " + "\n  ".join(found))
        return 1
    print("certificate: the interrupted run equals the uninterrupted run, bit for bit.")
    return 0


def _find_other_mistakes(arguments: Arguments, run_dir: Path) -> None:
    """Raise a UserError with the remaining mistakes, after some have been printed."""
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe

    build(read_recipe("fit", arguments), run_dir=run_dir)
