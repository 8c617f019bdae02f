"""Resuming through the command line: what is refused, what is passed over, where a branch goes, and the certificate."""

import os
from pathlib import Path
from unittest import mock

import pytest
import run_comparison as comparison
import torch
from recipe_runs import breaking, curve, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.disk_format import read, write
from lit_llm.config.parse import parse
from lit_llm.config.resolve import read_recipe, resolve
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


def test_auto_leaves_a_finished_run_as_it_is(trained, capsys):
    def files():
        return {p: (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in (trained / "checkpoints").rglob("*")}

    before = files()
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")
    assert code == 0 and "at step 8" in out and files() == before and "no checkpoint" not in err
    assert rows(trained, "train/loss") == list(range(1, 9)) and rows(trained, "val/loss") == [4, 8]


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


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def of_others(folder: Path) -> dict[str, tuple[str, str]]:
    """Values that a user can give to --resume by mistake, and the part of the message that explains each."""
    (folder / "text").write_text("hello")
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors").write_text("x")
    torch.save({"model": {}, "optimizer": {}}, folder / "nanogpt.pt")
    torch.save({"state_dict": {}, "evil": Evil()}, folder / "evil.ckpt")
    torch.save({"state_dict": {}}, folder / "weights.ckpt")
    torch.save({"state_dict": {}, "global_step": 5, "optimizer_states": [{}]}, folder / "lightning.ckpt")
    return {
        "nothing": ("no.ckpt", "there is no checkpoint no.ckpt to resume from (--resume PATH, or --resume auto)"),
        "text": ("text", "text is not a checkpoint, or it is damaged"),
        "hugging face": ("hf", "hf is not a checkpoint of lit_llm: it has no manifest.json of one"),
        "another program": ("nanogpt.pt", "is not a checkpoint of lit_llm or of Lightning: it has no 'state_dict'"),
        "code": ("evil.ckpt", "evil.ckpt cannot be loaded without running code from it"),
        "weights": ("weights.ckpt", "weights.ckpt holds weights only, no training state to resume"),
        "another model": ("lightning.ckpt", "lightning.ckpt is a checkpoint of another program: it has no model_config"),
        "a run": ("runs/tiny", "is a run folder: continue that run with --run runs/tiny --resume auto, or begin another"),
        "its folder": ("runs/tiny/checkpoints", "holds the checkpoints of a run: name one of them"),
        "nonsense": ("Auto", "there is no checkpoint Auto"),
    }


@pytest.mark.slow
def test_what_is_no_checkpoint_of_ours_is_refused_in_one_sentence(trained, folder, capsys):
    for path, said in of_others(folder).values():
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/other", "--resume", path)
        assert code == 2 and said in err and len(err.splitlines()) == 1 and err.startswith("error: "), err
        assert not Path("runs/other").exists() and not Path("evil").exists()


@pytest.mark.slow
def test_a_model_that_does_not_fit_the_checkpoint_is_refused_whatever_is_accepted(trained, capsys):
    path = str(trained / "checkpoints" / "last.ckpt")
    for flags, said in (
        (["--model.mlp", "swiglu"], "model.mlp was relu2 in the checkpoint and is swiglu: these weights do not fit"),
        (["--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "270"], "vocabulary has 257 ids and the data's 270"),
    ):
        more = ["--run_dir", "runs/other", "--resume", path, "--accept_changes", "true"]
        code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *more, *flags)
        assert code == 2 and said in err and err.count("error: ") == 1, err
        assert not Path("runs/other").exists()
    code, _, err = run(capsys, "validate", "--run", "runs/tiny", "--model.n_embd", "32")
    assert code == 2 and "model.n_embd was 16 in the checkpoint and is 32" in err


def test_a_branch_goes_into_a_folder_of_its_own_and_leaves_the_original_alone(trained, capsys):
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    Path("decay.yaml").write_text(
        "schedule: {class_path: Linear, init_args: {warmup_steps: 0, final_ratio: 0.0}}\nadditional_steps: 3\n"
    )
    path = str(trained / "checkpoints" / "step-00000006.ckpt")
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--config", "decay.yaml", "--resume", path)
    assert code == 0
    assert sorted(curve(Path("runs/tiny-decay"), "train/loss")) == [7, 8, 9]
    assert {p: p.stat().st_mtime_ns for p in trained.rglob("*")} == before


@pytest.mark.slow
def test_a_resume_into_another_runs_folder_is_refused(trained, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/other")
    path = str(trained / "checkpoints" / "last.ckpt")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/other", "--resume", path)
    assert code == 2 and "holds a run that did not start from" in err


def test_a_run_that_is_not_the_same_gets_no_certificate(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/a")
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/b", "--data.seed", "1")
    _, found = comparison.differences(Path("runs/a"), Path("runs/b"))
    assert any(sentence.startswith("train/loss differs first at 1") for sentence in found)
    assert any(sentence.startswith("checkpoint: state_dict differs first at state_dict.model.") for sentence in found)


@pytest.mark.slow
def test_a_launch_reads_the_values_of_a_checkpoint_once_and_parsing_reads_none(trained, capsys, monkeypatch):
    read, real = [], saved_run.read_values
    monkeypatch.setattr(saved_run, "read_values", lambda path: (read.append(Path(path).resolve().name), real(path))[1])

    def reads(*words: str) -> list[str]:
        read.clear()
        assert run(capsys, *words)[0] == 0
        return [*read]

    assert reads("validate", "--run", "runs/tiny") == ["step-00000008.ckpt"]
    branch = ["--resume", "runs/tiny/checkpoints/step-00000006.ckpt", "--additional_steps", "1", "--run_dir", "runs/branch"]
    assert reads("fit", "--config", "tiny.yaml", *branch) == ["step-00000006.ckpt"]
    longer = ["fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "9"]
    assert reads(*longer) == ["step-00000008.ckpt"]
    weights = ["--config", "tiny.yaml", "--init_from", "runs/tiny", "--run_dir", "runs/next"]
    assert reads("fit", *weights, "--trainer.max_steps", "3") == ["step-00000009.ckpt"]
    read.clear()
    parse("fit", weights)
    assert read == []


def test_a_branch_ends_after_its_steps_whatever_the_epochs_of_its_recipe(trained):
    branch = ["--resume", "runs/tiny/checkpoints/step-00000006.ckpt", "--additional_steps", "3", "--run_dir", "runs/branch"]
    settings = resolve(read_recipe("fit", ["--config", "tiny.yaml", *branch, "--trainer.max_epochs", "1"])).config.trainer
    assert (settings.max_steps, settings.max_epochs) == (9, -1)


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
    ("loader", lambda content: content["loops"]["fit_loop"]["state_dict"].update(combined_loader=-7)),
    ("loader", lambda content: content["loops"]["fit_loop"]["state_dict"].update(combined_loader=[{"x": 1}])),
    ("callbacks", lambda content: content["callbacks"].update({key: {"x": 1} for key in content["callbacks"]})),
    ("files", lambda content: content["callbacks"]["StepCheckpoint"].update(leaving=["../../../text.txt"])),
    ("files", lambda content: content["callbacks"]["StepCheckpoint"].update(kept=["../..", "step-00000008.ckpt"])),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(momentum_buffer=torch.ones(3))),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(step="three")),
    ("optimizer", lambda content: content["optimizer_states"][0]["state"][0].update(step=torch.ones(3))),
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


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to(path.name), lambda path: path.write_text("")], ids=["link", "file"]
)
def test_checkpoints_that_are_no_folder_are_refused_before_the_first_step(folder, capsys, make):
    Path("runs/tiny").mkdir(parents=True)
    make(Path("runs/tiny/checkpoints"))
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto")
    assert code == 2 and "checkpoints is no folder" in err and "step 1" not in out


@pytest.mark.parametrize("name", ["lock.json", ".config.yaml.partial", ".metrics.jsonl.partial", ".plan.json.partial"])
def test_nothing_is_written_through_a_link_in_the_run_folder(name, trained, capsys):
    target = Path("kept.txt")
    target.write_text("kept")
    (trained / name).symlink_to(target.absolute())
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "9")
    assert target.read_text() == "kept"
    assert (code, "link" in err) == ((2, True) if name == "lock.json" else (0, False)), err


@pytest.mark.parametrize("command", [["report", "--run", "runs/tiny", "--out", "page.html"], ["doctor", "--run", "runs/tiny"]])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "plan.json", "events.out.tfevents.1.x"])
def test_a_pipe_in_the_run_folder_is_no_hang(name, command, trained, capsys):
    (trained / name).unlink(missing_ok=True)
    os.mkfifo(trained / name)
    code, _, err = run(capsys, *command)
    assert code in (0, 1, 2) and (code != 2 or name.partition(".")[0] in err)


def test_an_error_of_a_save_in_a_resumed_run_keeps_its_traceback(trained, capsys, monkeypatch):
    def fail(self, *_, **__):
        raise RuntimeError("of a save")

    monkeypatch.setattr("lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector.dump_checkpoint", fail)
    with pytest.raises(RuntimeError, match="of a save"):
        run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "11")
