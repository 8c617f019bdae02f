"""Virtual environments that hold the wheel and nothing else of this repository."""

import os
import subprocess
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def make_environment(folder: Path) -> tuple[Path, Path]:
    """An empty virtual environment that finds torch and the like where this process does; its python and site-packages."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    printed = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True
    )
    site = Path(printed.stdout.strip())
    # A path in a .pth file is not searched for .pth files: an editable install of lit_llm there does not count.
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python, site


def run(*command: str | Path, cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints. Python finds modules as a user's shell would, not as this test session does."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"LIT_LLM_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode in codes, (command, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout
