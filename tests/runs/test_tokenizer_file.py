"""A run's tokenizer.json that has changed since its checkpoint is refused by every command that uses the run."""

import json
from pathlib import Path

import pytest
from recipe_runs import run

from lit_llm.checkpoint.format import read

FILE = "runs/tiny/tokenizer.json"


@pytest.fixture
def swapped(folder, capsys):
    """A run whose tokenizer.json maps two characters to each other's ids."""
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2", "--checkpoint.every_n_steps", "1")
    content = json.loads(Path(FILE).read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path(FILE).write_text(json.dumps(content))
    return folder


def test_every_command_names_the_changed_file(swapped, capsys):
    before = sorted(Path("runs").rglob("*"))
    for command in (
        ("generate", "--run", "runs/tiny", "--max_new_tokens", "2"),
        ("export", "--run", "runs/tiny", "--out", "exported"),
        ("validate", "--run", "runs/tiny"),
        ("test", "--run", "runs/tiny"),
        ("fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "3"),
        ("fit", "--config", "tiny.yaml", "--init_from", "runs/tiny", "--run_dir", "runs/other"),
    ):
        code, _, err = run(capsys, *command)
        assert code == 2, (command, err)
        assert f"{FILE} is not the file with which step-00000002.ckpt was trained" in err, (command, err)
    assert sorted(Path("runs").rglob("*")) == before and not Path("exported").exists()


def test_a_resume_may_accept_it_and_writes_the_tokenizer_of_the_data_again(swapped, capsys):
    flags = ("fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "3", "--accept_changes", "true")
    assert run(capsys, *flags)[0] == 0
    assert run(capsys, "generate", "--run", "runs/tiny", "--max_new_tokens", "2")[0] == 0


def test_a_checkpoint_without_the_checksum_is_accepted():
    old = Path(__file__).parents[1] / "fixtures" / "old_run"
    assert "tokenizer_sha256" not in read(old / "checkpoints/step-00000004.ckpt")
    from lit_llm.runs.tokenizer_file import tokenizer_problem

    assert tokenizer_problem(old / "checkpoints/step-00000004.ckpt", old) is None
