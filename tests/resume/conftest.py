"""One launcher for all tests here: its server imports once."""

import os

import matrix
import pytest
from launcher import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    os.environ["LIT_LLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the tiny recipe and its text."""
    folder = tmp_path_factory.mktemp("runs")
    matrix.prepare(folder)
    return folder
