"""Each script of benchmarks/ starts: what it imports is there. In one process, so that torch is imported once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import runpy, sys, traceback
from pathlib import Path

before = {*sys.modules}, [*sys.path]
for script in sorted(Path("benchmarks").glob("*.py")):
    sys.path[:] = ["benchmarks", *before[1]]
    try:
        runpy.run_path(str(script), run_name="imported")
    except BaseException:
        print(script, traceback.format_exc().splitlines()[-1])
    for name in {*sys.modules} - before[0]:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent.name == "benchmarks":  # has its own tables
            del sys.modules[name]
"""


@pytest.mark.slow
def test_every_script_can_be_imported():
    run = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stdout, run.stdout
