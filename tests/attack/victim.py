"""Runs commands with a fault of the disk in one process: a JSON case a line in, a JSON outcome a line out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for process_state, when this runs as a script
import fork_server
from faults import Fault
from process_state import restored_process_state


class Victim:
    """The process, seen from a test."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        self.process = fork_server.Popen([sys.executable, __file__], env=environment, **pipes)

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """The outcome of a case (`attack`)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self.process.stdout.readline())
        return outcome

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files below a folder, by relative path; folders have none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
    return found


def attack(case: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """Run a command in a new folder, with a fault or without; then another one, without the fault."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    os.chdir(folder)
    os.environ["LIT_LLM_CACHE"] = str(folder / "cache")
    try:
        for name, content in case["files"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        for words in case["setup"]:
            assert call(words)["code"] == 0
        with fault.injected(*case["fault"]) if case["fault"] else contextlib.nullcontext():
            outcome = call(case["words"])
            outcome["fault"] = fault.active
        outcome["files"] = contents(folder)
        # A real process has ended here. The next one takes over its lock, if it could not be deleted (test_lock.py).
        (folder / "runs/mine/lock.json").unlink(missing_ok=True)
        outcome["then"] = call(case["then"])
        outcome["finally"] = contents(folder)
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def call(words: list[str]) -> dict[str, Any]:
    """Call `main` as a process would: its exit code or traceback, and its output."""
    from lit_llm.__main__ import main

    out, err, trace, code = io.StringIO(), io.StringIO(), None, None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), restored_process_state():
            code = main(list(words))
    except BaseException:
        trace = traceback.format_exc()
    return {"code": code, "out": out.getvalue()[-4000:], "err": err.getvalue()[-4000:], "trace": trace}


def serve() -> None:
    outcomes, fault = os.fdopen(os.dup(1), "w"), Fault()
    os.dup2(2, 1)
    for line in sys.stdin:
        json.dump(attack(json.loads(line), fault), outcomes)
        outcomes.write("\n")
        outcomes.flush()


if __name__ == "__main__":
    serve()
