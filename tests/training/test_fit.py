"""What a failed start leaves in the run folder, and the line that says why training ended."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from recipe_runs import curve, run, table


class Fails(Callback):
    """Raises in the first micro-batch, as a model that does not fit into memory, or has a bug, would."""

    def __init__(self, error: str) -> None:
        self.error = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "bug": RuntimeError("mat1 and mat2")}[error]

    def on_train_batch_start(self, *_) -> None:
        raise self.error


class Interrupts(Callback):
    """Ctrl-C in this hook: twice within a step, because the first one waits for its end."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])


class StopsAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_) -> None:
        trainer.should_stop = trainer.global_step >= self.step


class Signals(StopsAfter):
    """Sends SIGTERM to the process, as a scheduler does."""

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def overlay(class_path: str, **arguments: object) -> list[str]:
    callback = {"class_path": class_path, "init_args": arguments}
    Path("more.yaml").write_text(yaml.dump({"trainer": {"callbacks+": [callback]}}))
    return ["--config", "more.yaml"]


@pytest.mark.parametrize(("error", "kind"), [("memory", torch.OutOfMemoryError), ("bug", RuntimeError)])
def test_after_a_failure_inside_the_first_step_the_same_command_works(folder, capsys, error, kind):
    with pytest.raises(kind):
        run(capsys, "fit", "--config", "tiny.yaml", *overlay("test_fit.Fails", error=error))
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")[0] == 0
    before = {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    for flag in (["--replace", "true"], ["--resume", "auto", "--trainer.max_steps", "3"]):
        with pytest.raises(kind):
            run(capsys, "fit", "--config", "tiny.yaml", *flag, *overlay("test_fit.Fails", error=error))
        assert {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_a_refused_configuration_removes_only_what_this_launch_made(folder, capsys):
    refused = ["--trainer.gradient_clip_val", "1"]
    assert run(capsys, "fit", "--config", "tiny.yaml", *refused)[0] == 2
    assert not Path("runs/tiny").exists()
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/notes.txt").write_text("mine")
    assert run(capsys, "fit", "--config", "tiny.yaml", *refused)[0] == 2
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["notes.txt"]
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")[0] == 0
    before = {str(path): path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()}
    assert run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", *refused)[0] == 2
    assert {str(path): path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(folder, capsys, hook):
    def interrupted(*flags: str) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from the first one on
        return run(capsys, "fit", "--config", "tiny.yaml", *overlay("test_fit.Interrupts", hook=hook), *flags)[0]

    assert interrupted() == 130
    assert not Path("runs/tiny").exists()
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")[0] == 0
    before = {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    for flags in (("--replace", "true"), ("--resume", "auto")):
        assert interrupted(*flags) == 130
        assert {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


# -- why training ended -------------------------------------------------------------------------------------------------


def recorded() -> tuple[str | None, bool]:
    """What plan.json says of the end of the last launch of runs/tiny."""
    launch = json.loads(Path("runs/tiny/plan.json").read_text())["launches"][-1]
    return launch["ended"], launch["complete"]


def ended(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("training ended")]


def test_the_last_step_says_that_it_was_the_last(folder, capsys):
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4", "--trainer.log_every_n_steps", "3")
    assert ended(out) == ["training ended after step 4: reached trainer.max_steps=4"]
    assert recorded() == ("reached trainer.max_steps=4", True)
    _, out, _ = run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto")
    assert ended(out) == ["training ended after step 4: reached trainer.max_steps=4"]


@pytest.mark.parametrize("epochs", [(), ("--trainer.limit_train_batches", "6")], ids=["one epoch", "cut epochs"])
def test_the_last_validation_is_not_lost_when_a_signal_stops_its_step(folder, capsys, epochs):
    flags = ("fit", "--config", "tiny.yaml", "--validation", "null", "--trainer.val_check_interval", "6", *epochs)
    assert run(capsys, *flags, *overlay("test_fit.Signals", step=8))[0] == 75
    assert run(capsys, *flags, "--resume", "auto")[0] == 0
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/loss" in line] == [3, 6, 8]


@pytest.mark.parametrize("step", [3, 6, 7])
def test_a_run_that_monitors_a_score_of_tasks_resumes_from_each_step_and_its_best_has_a_score(folder, capsys, step):
    Path("quiz.jsonl").write_text('{"query": "line 1", "choices": ["of", "a"], "gold": 0}\n')
    tasks = ("--tasks.tasks", '["quiz.jsonl"]', "--tasks.every_n_steps", "3", "--validation.every_n_steps", "2")
    monitor = (
        "--checkpoint.monitor",
        "task/quiz/bits_per_byte",
        "--checkpoint.every_n_steps",
        "1",
        "--checkpoint.keep_last",
        "9",
    )
    assert run(capsys, "fit", "--config", "tiny.yaml", *tasks, *monitor)[0] == 0
    scores = curve(Path("runs/tiny"), "task/quiz/bits_per_byte")
    best = f"step-{min(scores, key=scores.get):08d}.ckpt"
    assert list(scores) == [3, 6, 8] and os.readlink("runs/tiny/checkpoints/best.ckpt") == best
    for path in Path("runs/tiny/checkpoints").iterdir():
        if path.is_symlink():
            path.unlink()
        elif int(path.name[5:13]) > step:
            shutil.rmtree(path)
    assert run(capsys, "fit", "--config", "tiny.yaml", *tasks, *monitor, "--resume", "auto")[0] == 0
    assert os.readlink("runs/tiny/checkpoints/best.ckpt") == best


def test_a_misspelled_monitor_is_named_with_the_metric_that_was_meant(folder, capsys):
    stop = overlay("lightning.pytorch.callbacks.EarlyStopping", monitor="val/los")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *stop, "--validation.every_n_steps", "2")
    assert code == 2 and "EarlyStopping monitors 'val/los', but the logged metrics are: " in err
    assert err.rstrip().endswith("(monitor of EarlyStopping in trainer.callbacks). Did you mean 'val/loss'?")
    assert "train/loss" in err and "health/" not in err and "setup/" not in err
    flags = ("--checkpoint.monitor", "val_loss", "--validation.every_n_steps", "2", "--replace", "true")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert (
        code == 2 and "StepCheckpoint monitors 'val_loss', but" in err and "(--checkpoint.monitor). Did you mean 'val/l" in err
    )


def test_early_stopping_is_named_with_its_metric_and_value(folder, capsys):
    stop = overlay("lightning.pytorch.callbacks.EarlyStopping", monitor="val/loss", patience=1, min_delta=100.0)
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *stop, "--validation.every_n_steps", "2")
    losses = [float(line.split("val/loss ")[1].split()[0]) for line in out.splitlines() if "validation after" in line]
    (line,) = ended(out)
    assert line.startswith("training ended after step 4: early stopping: val/loss is ") and line.endswith("patience 1")
    assert float(line.split(" is ")[1].split(",")[0]) == pytest.approx(losses[1], rel=1e-4)
    kept, _, rest = line.split(", ")[1].partition(" ")
    assert float(kept) == pytest.approx(losses[0], rel=1e-4) and rest == "at its last improvement by 100 or more"
    assert recorded() == (line.partition(": ")[2], True), "the end that the settings ask for"
    step = Path("runs/tiny/checkpoints/last.ckpt").resolve()
    for has_file in (True, False, False):  # the same command again changes nothing, also if a kill came before the file
        if not has_file:
            Path("runs/tiny/ended.json").unlink(missing_ok=True)
        code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *stop, "--validation.every_n_steps", "2", "--resume", "auto")
        assert code == 0 and Path("runs/tiny/checkpoints/last.ckpt").resolve() == step
        assert ended(out) == [line] if has_file else "training ended after step 4: early stopping: " in ended(out)[0]
        assert table(out)["val/loss"] == pytest.approx(losses[1], abs=1e-3)
    branch = ["--run_dir", "branch", "--resume", str(step), "--validation.every_n_steps", "2"]
    ends = [ended(run(capsys, "fit", "--config", "tiny.yaml", *stop, *branch)[1])[0] for _ in range(2)]
    assert ends[0].startswith("training ended after step 6: early stopping") and ends[1] == ends[0], "a branch stays ended, too"
    code, out, err = run(capsys, "report", "--compare", "runs", "--out", "page.html")
    assert code == 0 and "note: tiny" not in out and "it runs, was stopped" not in Path("page.html").read_text(), err


def test_more_patience_continues_a_run_that_stopped_early(folder, capsys):
    def launch(patience: int, *flags: str) -> str:
        stop = overlay("lightning.pytorch.callbacks.EarlyStopping", monitor="val/loss", patience=patience, min_delta=100.0)
        return run(capsys, "fit", "--config", "tiny.yaml", *stop, "--validation.every_n_steps", "1", *flags)[1]

    assert "training ended after step 2: early stopping" in launch(1)
    assert "training ended after step 4: early stopping" in launch(3, "--resume", "auto")  # one validation before, two more
    # A changed machine is no reason to train on, another rate is.
    assert "training ended after step 4: early stopping" in launch(3, "--resume", "auto", "--compute.matmul_precision", "high")
    more = ("--resume", "auto", "--accept_changes", "true", "--optimizer.lr", "0.03")
    assert "training ended after step 5: early stopping" in launch(3, *more)


def test_the_last_step_is_validated_whatever_triggers_validation(folder, capsys):
    every = ["--validation", "null", "--trainer.val_check_interval", "10"]  # in micro-batches: after step 5 of 8
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *every)
    measured = curve(Path("runs/tiny"), "val/loss")
    assert sorted(measured) == [5, 8] and table(out)["val/loss"] == pytest.approx(measured[8], abs=1e-4)
    assert measured[8] < measured[5] and os.readlink("runs/tiny/checkpoints/best.ckpt") == "step-00000008.ckpt"
    _, out, _ = run(capsys, "validate", "--run", "runs/tiny", "--ckpt_path", "last")  # a process that knows no other value
    assert table(out)["val/loss"] == pytest.approx(measured[8], abs=1e-4)


def test_a_signal_is_no_end_that_the_settings_ask_for(folder, capsys):
    code, _, _ = run(capsys, "fit", "--config", "tiny.yaml", *overlay("test_fit.Signals", step=2))
    assert code != 0 and recorded() == ("stopped by SIGTERM", False)
    out = run(capsys, "report", "--compare", "runs", "--out", "page.html")[1]
    assert "note: tiny has 2 of 8 steps: stopped by SIGTERM." in out
    assert run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--trainer.callbacks", "null")[0] == 0
    assert recorded() == ("reached trainer.max_steps=8", True)


def test_a_time_limit_an_epoch_limit_and_a_callback_are_named(folder, capsys):
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *overlay("test_fit.StopsAfter", step=2))
    assert ended(out) == ["training ended after step 2: a callback stopped it"]
    assert recorded() == ("a callback stopped it", True)
    _, out, _ = run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto")
    assert ended(out) == ["training ended after step 2: a callback stopped it"]
    limit = ["--trainer.max_time", "{seconds: 0}", "--trainer.max_steps", "100000"]
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/time", *limit)
    assert len(ended(out)) == 1 and ended(out)[0].endswith(": reached trainer.max_time")
