"""A fork is what a new interpreter would be, but for the imports."""

import json
import os
import signal
import subprocess
import sys

import fork_server
import pytest

STATE = """
import json, os, random, signal, sys, tempfile
import numpy, torch
print(json.dumps({
    "name": __name__, "module": sys.modules["__main__"].__dict__ is globals(), "file": globals().get("__file__"),
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ), "stdin": sys.stdin.read(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "files": sorted(int(f) for f in os.listdir("/proc/self/fd")), "threads": torch.get_num_threads(),
    "temporary": tempfile.gettempdir(),
}))
"""
NEW = {
    "torch": "import torch; print(torch.rand(1).item())",
    "random": "import random; print(random.random())",
    "numpy": "import numpy; print(numpy.random.random())",
}


@pytest.mark.parametrize("kind", ["script", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("module", "source"))])
def test_it_has_the_state_of_a_new_interpreter(tmp_path, kind):
    (tmp_path / "state.py").write_text(STATE)
    (tmp_path / "elsewhere").mkdir()
    words = {"script": [str(tmp_path / "state.py")], "module": ["-m", "state"], "source": ["-c", STATE]}[kind]
    folder = tmp_path if kind == "module" else tmp_path / "elsewhere"
    read_at_import = {name: os.environ[name] for name in fork_server.READ_AT_IMPORT if name in os.environ}
    options = {
        "env": {
            **read_at_import,
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(tmp_path / "more"),
            "TMPDIR": str(tmp_path),
        },
        "cwd": folder,
        "input": "given",
        "capture_output": True,
        "text": True,
    }
    forked, new = (run([sys.executable, *words, "a", "b c"], **options) for run in (fork_server.run, subprocess.run))
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (0, "")
    mine, expected = json.loads(forked.stdout), json.loads(new.stdout)
    expected["environment"].pop("LC_CTYPE", None)  # a new interpreter may set it
    assert mine.pop("files")[:3] == expected.pop("files")[:3]
    assert mine == expected


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(75)", 75, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, ""),
        (
            "import threading, time; threading.Thread(target=lambda: [time.sleep(0.2), print('last')]).start(); print('first')",
            0,
            "",
        ),
    ],
)
def test_it_ends_as_an_interpreter_does(source, code, said):
    done = fork_server.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.endswith(said) and bool(done.stderr) == bool(said)
    assert done.stdout == ("first\nlast\n" if "last" in source else "")
