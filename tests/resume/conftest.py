"""One launcher for all tests here: the fork server imports once."""

import matrix
import pytest
from launcher import Launcher


@pytest.fixture(scope="session")
def launcher():
    return Launcher()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tiny recipe and its text."""
    folder = tmp_path_factory.mktemp("runs")
    matrix.prepare(folder)
    return folder
