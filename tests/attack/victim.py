"""Runs attacks, one after another, in one process: a JSON case a line in, a JSON outcome a line out.

Limits of each attack: `CPU_SECONDS` of this process, `PROCESSES`, and `MEMORY` bytes above what the imports take. A hang that
uses no CPU, or in C code, ends the whole process after `WALL_SECONDS`; whoever reads the outcomes notices.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for process_state, when this runs as a script
from cases import BYSTANDERS, RECIPE, TEXT
from faults import Fault
from process_state import restored_process_state

CPU_SECONDS = 30.0
WALL_SECONDS = 240
MEMORY = 6 * 2**30


PROCESSES = 64
FAULT = Fault()
MADE: dict[str, Path] = {}
"""Folders after a case's commands of preparation, by these."""


class TimeIsUp(BaseException):
    """The attack took more than its CPU time."""


class TooManyProcesses(BaseException):
    """The attack started more than `PROCESSES` processes."""


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files below a folder, by relative path; folders have none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
    return found


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def set_up(commands: list[list[str]], folder: Path, main: Any) -> None:
    """Run commands in a new folder, or copy what they made for an earlier case."""
    name = json.dumps(commands)
    if name in MADE:
        shutil.copytree(MADE[name], folder, symlinks=True, dirs_exist_ok=True)
    else:
        for words in commands:
            outcome = call(main, words)
            assert outcome["code"] == 0, outcome
        MADE[name] = Path(tempfile.mkdtemp(prefix="attack-"))
        shutil.copytree(folder, MADE[name], symlinks=True, dirs_exist_ok=True)


def attack(case: dict[str, Any], main: Any) -> dict[str, Any]:
    """Run one case in a new folder; returns what happened."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    os.chdir(folder)
    os.environ["LIT_LLM_CACHE"] = str(folder / "cache")
    for name, content in {"recipe.yaml": RECIPE.encode(), "text.txt": TEXT.encode(), **BYSTANDERS}.items():
        write(folder, name, content)
    try:
        set_up(case["setup"], folder, main)
        for name, content in case["files"].items():
            write(folder, name, content.encode("latin-1"))
        before = contents(folder)
        with FAULT.injected(*case["fault"]) if case["fault"] else contextlib.nullcontext():
            outcome = call(main, case["words"])
            outcome["fault"] = FAULT.active
        after = contents(folder)
        if case["then"]:
            # A real process has ended here. The next one takes over its lock, if it could not be deleted (test_lock.py).
            (folder / "runs/mine/lock.json").unlink(missing_ok=True)
            outcome["then"] = call(main, case["then"])
            outcome["finally"] = contents(folder)
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    outcome["files"] = after
    outcome["changed"] = [name for name in before if after.get(name) != before[name]]
    outcome["new"] = sorted(set(after) - set(before))
    return outcome


def call(main: Any, words: list[str]) -> dict[str, Any]:
    """Call `main` as a process would: its exit code or traceback, its output, its CPU seconds."""
    out, err, trace, code = io.StringIO(), io.StringIO(), None, None
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 1.0)
    faulthandler.dump_traceback_later(WALL_SECONDS, exit=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), restored_process_state():
            code = main(list(words))
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        trace = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
    seconds = time.process_time() - began
    return {"code": code, "out": out.getvalue()[-4000:], "err": err.getvalue()[-4000:], "trace": trace, "seconds": seconds}


def serve() -> None:
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = [0]
    import lit_llm.config.build
    import lit_llm.training.fit  # noqa: F401
    from lit_llm.__main__ import main

    def time_is_up(signum: int, frame: Any) -> None:
        raise TimeIsUp

    def count(event: str, args: Any) -> None:
        if event == "os.fork":
            started[0] += 1
            if started[0] > PROCESSES:
                raise TooManyProcesses

    signal.signal(signal.SIGPROF, time_is_up)
    sys.addaudithook(count)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for line in sys.stdin:
        started[0] = 0
        json.dump(attack(json.loads(line), main), outcomes)
        outcomes.write("\n")
        outcomes.flush()
    for folder in MADE.values():
        shutil.rmtree(folder)


if __name__ == "__main__":
    serve()
