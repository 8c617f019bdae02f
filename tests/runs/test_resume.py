"""Resuming through the command line: what is refused, what is passed over, where a branch goes, and the certificate."""

from pathlib import Path
from unittest import mock

import pytest
import run_comparison as comparison
import torch
from recipe_runs import breaking, curve, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.disk_format import read, write
from lit_llm.runs import saved_run


def damage(checkpoint: Path) -> None:
    file = checkpoint / "checkpoint.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def trained(folder, made, capsys):
    made(folder, lambda: run(capsys, "fit", "--config", "tiny.yaml"))
    return Path("runs/tiny")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(trained, capsys):
    damage((trained / "checkpoints" / "last.ckpt").resolve())
    before = {tag: curve(trained, tag) for tag in ("train/loss", "val/loss", "lr", "grad/norm")}
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")
    assert code == 0
    assert "step-00000008.ckpt is damaged" in err and "resume: from step 6" in out and "at step 8" in out
    assert rows(trained, "train/loss") == list(range(1, 9))
    assert {tag: curve(trained, tag) for tag in before} == before  # made again, bit for bit
    assert disk_format.damage(trained / "checkpoints" / "last.ckpt") is None


def rows(run_dir: Path, tag: str) -> list[int]:
    """The steps that TensorBoard shows; one that is there twice would be a curve that goes back."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_auto_starts_a_run_that_is_not_there_and_again_one_that_was_killed_before_its_first_checkpoint(folder, capsys):
    flags = ["fit", "--config", "tiny.yaml", "--resume", "auto", "--checkpoint.every_n_steps", "100"]
    with pytest.raises(KeyError, match="broken"):
        run(capsys, *flags, *breaking(4))
    assert Path("runs/tiny/config.yaml").exists() and not Path("runs/tiny/checkpoints").exists()
    assert rows(Path("runs/tiny"), "train/loss") == [1, 2, 3]
    code, _, err = run(capsys, *flags)
    assert code == 0 and rows(Path("runs/tiny"), "train/loss") == list(range(1, 9))
    assert "note: runs/tiny has no checkpoint to continue from, so training starts at step 1 (--resume auto)" in err


def test_nothing_is_started_anew_over_checkpoints_that_are_all_damaged(trained, capsys):
    for checkpoint in (trained / "checkpoints").glob("step-*.ckpt"):
        damage(checkpoint)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")
    assert code == 2 and "--replace true" in err and err.count("damaged") >= 2


def test_a_damaged_checkpoint_given_by_path_is_refused(trained, capsys):
    path = (trained / "checkpoints" / "last.ckpt").resolve()
    damage(path)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/other", "--resume", str(path))
    assert code == 2 and "damaged" in err and not Path("runs/other").exists()


@pytest.mark.slow
def test_a_change_that_would_fork_the_run_is_refused_with_what_changed(trained, capsys):
    for flags, said in (
        (["--model.n_embd", "32"], "model.n_embd was 16 in the checkpoint and is 32"),
        (["--model.dropout", "0.5"], "--accept_changes true"),
        (["--data.global_batch_size", "8"], "data.global_batch_size was 4 in the checkpoint and is 8"),
        (["--data.seed", "5"], "data.seed"),
        (["--data", "PythonStdlib"], "position in the data is unknown"),
    ):
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "10", *flags)
        assert code == 2 and said in err, err
        assert sorted(curve(trained, "train/loss")) == list(range(1, 9))


@pytest.mark.slow
def test_a_changed_text_is_refused_until_it_is_accepted(trained, capsys):
    text = Path("text.txt")
    text.write_text(text.read_text().upper())
    flags = ["fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "10"]
    code, _, err = run(capsys, *flags)
    assert code == 2 and "text.txt has changed (--accept_changes true" in err
    code, *_ = run(capsys, *flags, "--accept_changes", "true")
    assert code == 0 and sorted(curve(trained, "train/loss"))[-1] == 10


def test_a_run_that_is_not_the_same_gets_no_certificate(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/a")
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/b", "--data.seed", "1")
    _, found = comparison.differences(Path("runs/a"), Path("runs/b"))
    assert any(sentence.startswith("train/loss differs first at 1") for sentence in found)
    assert any(sentence.startswith("checkpoint: state_dict differs first at state_dict.model.") for sentence in found)


def test_the_values_of_a_checkpoint_hold_no_data_and_keep_no_file_open(trained):
    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "checkpoint.pt" in line}

    before = mapped()
    values = saved_run.SavedRun.read(trained / "checkpoints" / "last.ckpt").values
    assert values["global_step"] == 8 and values["model_config"]["n_embd"] == 16
    tensors = [*values["state_dict"].values(), *values["optimizer_states"][0]["state"][0].values()]
    assert all(tensor.is_meta for tensor in tensors if isinstance(tensor, torch.Tensor)) and len(tensors) > 5
    assert mapped() <= before


def rewrite(checkpoint: Path, change) -> None:
    """Change the content of a checkpoint, with checksums that are right."""
    content = read(checkpoint)
    change(content)
    with mock.patch.object(disk_format, "_checked", lambda content, *_, **__: content):  # a save would refuse it
        write(content, checkpoint)


def keys_of(content: dict, callback: str) -> str:
    return next(key for key in content["callbacks"] if key.startswith(callback))


WRONG_STATES = [
    ("loops", lambda content: content.update(loops={"fit_loop": {"epoch_loop.batch_progress": {"total": "x"}}})),
    ("loader", lambda content: content["loops"]["fit_loop"]["state_dict"].update(combined_loader=[{"x": 1}])),
    ("callbacks", lambda content: content["callbacks"].update({key: {"x": 1} for key in content["callbacks"]})),
    ("files", lambda content: content["callbacks"]["StepCheckpoint"].update(kept=["../..", "step-00000008.ckpt"])),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(momentum_buffer=torch.ones(3))),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(step="three")),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(step=torch.tensor(-3.0))),
    ("optimizer", lambda content: content["optimizer_states"][0]["param_groups"].pop()),
    ("TextFiles", lambda content: content.update(TextFiles=[])),
    ("score", lambda content: content["callbacks"][keys_of(content, "StepCheckpoint")].update(best_score=b"x")),
    ("TextFiles", lambda content: content["TextFiles"].update(consumed_samples={})),
    ("model", lambda content: content["model_config"].update(n_layer={})),
    ("weights", lambda content: content["state_dict"].update({"model.more": torch.ones(1)})),
    ("dtype", lambda content: content.update(state_dict={k: v.to(torch.int8) for k, v in content["state_dict"].items()})),
]


@pytest.mark.parametrize(
    ("key", "change"),
    [pytest.param(*each, marks=() if i % 4 == 0 else pytest.mark.slow) for i, each in enumerate(WRONG_STATES)],
)
def test_a_state_that_cannot_be_restored_is_one_sentence_and_the_folder_is_as_before(key, change, trained, capsys):
    newest = (trained / "checkpoints/last.ckpt").resolve()
    rewrite(newest, change)
    before = {path: path.read_bytes() for path in trained.glob("*") if path.is_file()}
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "9")
    assert code == 2 and err.count("error: ") >= 1, err
    assert {path: path.read_bytes() for path in trained.glob("*") if path.is_file()} == before
    if key in ("weights", "dtype", "model"):
        for words in (["validate", "--run", "runs/tiny"], ["fit", "--config", "tiny.yaml", "--init_from", "runs/tiny"]):
            code, _, err = run(capsys, *words, *(["--run_dir", "runs/new"] if words[0] == "fit" else []))
            assert code == 2 and "error: " in err, words


def test_a_checkpoint_without_weights_is_a_sentence(trained, capsys):
    rewrite((trained / "checkpoints/last.ckpt").resolve(), lambda content: content.pop("state_dict"))
    code, _, err = run(capsys, "generate", "--run", "runs/tiny", "--prompt", "a")
    assert code == 2 and "state_dict" in err


def test_what_a_kill_left_in_a_finished_run_is_cleared_when_it_is_launched_again(trained, capsys):
    left = trained / "checkpoints/.step-00000003.ckpt.removed"
    left.mkdir()
    assert run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")[0] == 0
    assert not left.exists()
