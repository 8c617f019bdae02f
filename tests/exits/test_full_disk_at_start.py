"""A disk that is full when a run starts: one sentence, exit code 2, and a run folder as it was before."""

import errno
import os
from pathlib import Path

import pytest
from recipe_runs import run
from tensorboard.compat.tensorflow_stub.io import gfile

from lit_llm.callbacks import ordinary_files
from lit_llm.runs.lock import RunLock


def full_for(monkeypatch, *names):
    """The disk is full for files of these names in the run folder."""

    def new_file(path, mode="xb"):
        path.unlink(missing_ok=True)
        return (Path("/dev/full") if path.name in names and path.parent.name == "tiny" else path).open("wb")

    monkeypatch.setattr(ordinary_files, "new_file", new_file)


def content_of(folder):
    return {path.name: path.is_symlink() or path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("file", [".config.yaml.partial", pytest.param(".tokenizer.json.partial", marks=pytest.mark.slow)])
def test_a_file_that_cannot_be_written(folder, capsys, monkeypatch, file):
    run_dir = Path("runs/tiny")
    run_dir.mkdir(parents=True)
    (run_dir / "notes.txt").write_text("mine")
    full_for(monkeypatch, file)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml")
    (said,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and "run folder runs/tiny cannot be written: No space left on device" in said and "--run_dir" in said
    assert "Traceback" not in err
    assert content_of(run_dir) == {"notes.txt": b"mine"}


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_lock_that_cannot_be_written(folder, capsys, monkeypatch):
    monkeypatch.setattr(RunLock, "_try_to_write", no_room)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml")
    assert code == 2 and "error: run folder runs/tiny cannot be written: No space left on device (--run_dir DIR)" in err
    assert not Path("runs/tiny").exists()


def test_events_that_cannot_be_written(folder, capsys, monkeypatch):
    monkeypatch.setattr(gfile.LocalFileSystem, "write", no_room)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml")
    assert code == 2 and "error: run folder runs/tiny cannot be written: No space left on device" in err
    assert not Path("runs/tiny").exists()


@pytest.mark.slow
def test_a_continued_run_keeps_its_configuration_and_tokenizer(folder, capsys, monkeypatch):
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")[0] == 0
    run_dir = Path("runs/tiny")
    before = content_of(run_dir)
    for file in (".config.yaml.partial", ".tokenizer.json.partial"):
        with monkeypatch.context() as patch:
            full_for(patch, file)
            assert run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--trainer.max_steps", "4")[0] == 2
        assert content_of(run_dir) == before
    assert run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--trainer.max_steps", "4")[0] == 0
