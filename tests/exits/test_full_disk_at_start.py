"""A disk that is full when a run starts: one sentence, exit code 2, and a run folder as it was before."""

from pathlib import Path

import pytest
from recipe_runs import run

from lit_llm.callbacks import files


def full_for(monkeypatch, *names):
    """The disk is full for files of these names in the run folder."""

    def opened(path, mode):
        return open("/dev/full" if path.name in names and path.parent.name == "tiny" else path, mode)

    monkeypatch.setattr(files, "open", opened, raising=False)


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
