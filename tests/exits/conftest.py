"""One launcher for all tests here: the fork server imports once."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "resume"))
from launcher import Launcher


@pytest.fixture(scope="session")
def launcher():
    return Launcher(Path(__file__).parent)
