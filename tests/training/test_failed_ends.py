"""A run whose result cannot be used exits with 1, and says why."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from recipe_runs import curve, run

from lit_llm.checkpoint import crash_safe


class Poison(Callback):
    """Makes the weights NaN at the start of an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.step:
            with torch.no_grad():
                next(pl_module.parameters()).fill_(float("nan"))


class FullDisk(Callback):
    """No checkpoint can be written during and after these optimizer steps. SIGTERM arrives in one of them."""

    def __init__(self, steps: list[int], signal_in: int = 0) -> None:
        self.steps, self.signal_in = steps, signal_in

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        vars(crash_safe).pop("open", None)
        if trainer.global_step + 1 in self.steps:
            crash_safe.open = self.no_room
        if trainer.global_step + 1 == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def teardown(self, trainer, pl_module, stage):
        vars(crash_safe).pop("open", None)

    @staticmethod
    def no_room(path, mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fit(capsys, *callbacks: tuple[str, dict], flags: tuple[str, ...] = ()) -> tuple[int, str]:
    chosen = [{"class_path": f"test_failed_ends.{name}", "init_args": arguments} for name, arguments in callbacks]
    Path("more.yaml").write_text(yaml.dump({"trainer": {"callbacks+": chosen}}) if chosen else "{trainer: {max_steps: 8}}")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "more.yaml", *flags)
    return code, "\n".join(line for line in err.splitlines() if line.startswith("error:"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--spike_guard", "null"),
        ("--trainer.limit_val_batches", "0", "--checkpoint.monitor", "null"),
    ],
)
def test_a_loss_that_is_not_finite_at_the_end(folder, capsys, flags):
    assert fit(capsys, ("Poison", {"step": 7}), flags=flags) == (
        1,
        "error: training ended after step 8 with train/loss nan: continue from a checkpoint before (--resume PATH) with a "
        "lower learning rate (--optimizer.lr) or stronger clipping (--gradient_norm.clip)",
    )


class NoTarget(Callback):
    """Optimizer steps without a target."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_train_start(self, trainer, pl_module):
        trainer.datamodule.every_target_counts = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 in self.steps:
            batch["targets"].fill_(-100)


def test_a_last_step_without_targets_is_no_failure_and_does_not_stop_a_run_early(folder, capsys):
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "train/loss", "patience": 9}}
    Path("stop.yaml").write_text(yaml.dump({"trainer": {"callbacks+": [stop]}}))
    flags = ("--config", "stop.yaml", "--spike_guard", "null")
    assert fit(capsys, ("NoTarget", {"steps": [4, 8]}), flags=flags) == (0, "")  # validates after both
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == [1, 2, 3, 5, 6, 7]
    assert sorted(curve(Path("runs/tiny"), "grad/norm")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_no_checkpoint_at_all_and_no_last_checkpoint(folder, capsys):
    code, said = fit(capsys, ("FullDisk", {"steps": list(range(1, 9))}))
    assert code == 1
    assert said == (
        "error: the last checkpoint, after step 8, could not be saved, and runs/tiny has none: make room on the disk, or "
        "choose another folder (--run_dir), and start again with --resume auto"
    )
    code, said = fit(capsys, ("FullDisk", {"steps": [8]}), flags=("--replace", "true"))
    kept = Path("runs/tiny/checkpoints/step-00000006.ckpt")
    assert code == 1 and f"could not be saved, and the newest one is {kept.absolute()}: make room" in said
    assert kept.is_dir() and os.readlink("runs/tiny/checkpoints/last.ckpt") == kept.name


def test_no_step_at_all(folder, capsys):
    code, said = fit(capsys, flags=("--trainer.max_time", "00:00:00:00"))
    assert (code, said) == (
        1, "error: no optimizer step was made: reached trainer.max_time (--trainer.max_time, --trainer.max_steps)"
    )  # fmt: skip


def test_a_signal_is_no_promise_to_continue_if_its_save_failed(folder, capsys):
    code, said = fit(capsys, ("FullDisk", {"steps": [5], "signal_in": 5}))
    assert code == 1 and said.startswith("error: stopped by SIGTERM; the last checkpoint, after step 5, could not be saved")


@pytest.mark.slow
def test_ends_that_are_fine(folder, capsys):
    assert fit(capsys, ("FullDisk", {"steps": [3, 4, 5, 6]})) == (0, "")  # saved again at the end
    assert fit(capsys, flags=("--resume", "auto")) == (0, "")  # a finished run: nothing to save
    assert fit(capsys, flags=("--checkpoint", "null", "--run_dir", "runs/none")) == (0, "")
    assert fit(capsys, flags=("--trainer.fast_dev_run", "true", "--run_dir", "runs/dev")) == (0, "")
    branch = ("--resume", "runs/tiny/checkpoints/step-00000008.ckpt", "--run_dir", "runs/branch")
    assert fit(capsys, ("FullDisk", {"steps": [1]}), flags=branch) == (0, "")  # ends where it begins
