"""OpenMP's threads wait awake for a bounded time: set before torch is imported, unless the user has decided."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
RUN = """
import os, subprocess, sys
import lit_llm.__main__ as program
command = [sys.executable, "-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))"]
program.run_and_end = lambda *_, **__: print("torch" in sys.modules, subprocess.check_output(command, text=True).strip())
program._run()
"""


def said(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in USERS} | {"PYTHONPATH": ROOT} | variables
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "inherited"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
        ({"KMP_BLOCKTIME": "0"}, "None"),
    ],
)
def test_the_command_sets_it_before_torch_and_for_its_children(given, inherited):
    assert said(RUN, **given).stdout.split() == ["False", inherited]


def test_torchs_openmp_reads_the_variable():
    spec = importlib.util.find_spec("torch")
    found = [*Path(spec.origin).parent.glob("lib/libgomp*.so*"), *Path(spec.origin).parents[1].glob("torch.libs/libgomp*.so*")]
    if not found:
        pytest.skip("this torch has no OpenMP of GNU beside it")
    code = f"import ctypes; ctypes.CDLL({str(found[0])!r})"
    assert "GOMP_SPINCOUNT = '20000'" in said(code, GOMP_SPINCOUNT="20000", OMP_DISPLAY_ENV="verbose").stderr
