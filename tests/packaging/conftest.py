"""The wheel of this checkout, built once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of what is built from, because building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for package in ("lit_llm", "callbacks", "recipes"):
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="session")
def build():
    """Builds a "wheel" or an "sdist" with the backend that pyproject.toml names, the way pip calls it."""

    def build(kind: str, source: Path, into: Path) -> Path:
        script = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(into)!r}))"
        done = subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True, text=True)
        return into / done.stdout.splitlines()[-1]

    return build


@pytest.fixture(scope="session")
def wheel(source, build, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))
