"""Isolation of tests from each other, time limits by tier, and the folder in which command line tests run."""

import gc
import shutil
import signal

import fork_server
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from process_state import restored_process_state
from recipe_runs import RECIPE, TEXT
from tensorboard.summary.writer import event_file_writer

SECONDS = {"slow": 900, "soak": 3600}
"""Time limit of a test with this marker. pyproject.toml has that of the others."""


def pytest_configure():
    """A shell starts commands in the background with Ctrl-C ignored, and children inherit that. Tests of it hold there too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # TensorBoard reads event files in the order of their names: second, host, process, counter. A test that starts and resumes
    # a run within one second needs counters with the same number of digits: "99" is read after "100".
    event_file_writer._global_uid = event_file_writer.AtomicCounter(1_000_000)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported stays: to search it again and again takes a twentieth of the tests' time


def pytest_unconfigure():
    fork_server.stop()


GPUS = {"cuda": 1, "nccl": 2}
"""How many a test with this marker needs."""


def pytest_collection_modifyitems(items):
    there = torch.cuda.device_count()
    for item in items:
        for marker, needed in GPUS.items():
            if item.get_closest_marker(marker) and there < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs"))
        for marker, seconds in SECONDS.items():
            if item.get_closest_marker(marker) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session", autouse=True)
def shard_cache(tmp_path_factory):
    """Tokenised text is cached for one test session only: never in the home directory, never from an earlier version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_LLM_CACHE", str(tmp_path_factory.mktemp("shard-cache")))
        yield


@pytest.fixture(autouse=True)
def isolated():
    with restored_process_state():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a tiny recipe and its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(folder, make)` calls `make` once for the tests of a module, and copies what it has left for the others."""
    kept = tmp_path_factory.mktemp("made") / "folder"

    def made(folder, make):
        if kept.exists():
            shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
        else:
            make()
            shutil.copytree(folder, kept, symlinks=True)

    return made


@pytest.fixture
def no_gpu(monkeypatch):
    """Lightning and torch find no accelerator, whatever this machine has."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
