import os
from pathlib import Path

import pytest
import torch
from foreign import Foreign, fit, make_trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lit_llm.callbacks import StepCheckpoint, ValidateEvery

VAL = {"limit_val_batches": 1.0}


def files(tmp_path):
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if not p.is_symlink())


def link(tmp_path, name):
    return os.readlink(tmp_path / "checkpoints" / f"{name}.ckpt")


def state(path):
    return torch.load(path, weights_only=True)


def test_steps_are_saved_at_multiples_and_at_the_end_and_the_newest_kept(tmp_path):
    trainer, _, _ = fit([StepCheckpoint(3, monitor=None)], tmp_path, steps=8)
    assert files(tmp_path) == ["step-00000006.ckpt", "step-00000008.ckpt"]
    assert link(tmp_path, "last") == "step-00000008.ckpt"  # relative: the folder may be moved
    assert not (tmp_path / "checkpoints" / "best.ckpt").exists()
    callback = trainer.checkpoint_callback
    assert isinstance(callback, StepCheckpoint)
    assert callback.last_model_path == str(tmp_path / "checkpoints" / "step-00000008.ckpt")
    assert callback.best_model_path == "" and callback.best_model_score is None
    assert [state(tmp_path / "checkpoints" / f)["global_step"] for f in files(tmp_path)] == [6, 8]


@pytest.mark.parametrize(
    ("mode", "losses", "best"),
    [
        ("min", [3.0, 1.0, 2.0, 2.5], 4),
        ("max", [3.0, 1.0, 4.0, 2.5], 6),
        (
            "min",
            [float("nan"), 3.0, 5.0, 9.0],
            4,
        ),  # Comparisons with NaN are false, so a NaN as first best would stay the best
        ("min", [3.0, float("-inf"), 5.0, 9.0], 2),
    ],
)
def test_best_follows_the_monitor_and_outlives_the_newer_ones(tmp_path, mode, losses, best):
    module = Foreign(steps=8, val_losses=losses)
    callback = StepCheckpoint(3, keep_last=1, mode=mode)
    fit([ValidateEvery(2), callback], tmp_path, module=module, steps=8, **VAL)
    assert link(tmp_path, "best") == f"step-{best:08d}.ckpt"
    assert link(tmp_path, "last") == "step-00000008.ckpt"
    assert files(tmp_path) == [f"step-{best:08d}.ckpt", "step-00000008.ckpt"]
    assert callback.best_model_score.item() == pytest.approx(losses[best // 2 - 1])
    assert callback.best_model_path.endswith(f"/checkpoints/step-{best:08d}.ckpt")


def test_a_save_that_meets_a_validation_waits_for_it_and_knows_its_result(tmp_path):
    module = Foreign(steps=8, val_losses=[3.0, 1.0])
    stop = EarlyStopping("val/loss", patience=5)
    fit([ValidateEvery(4), stop, StepCheckpoint(4)], tmp_path, module=module, steps=8, **VAL)
    saved = state(tmp_path / "checkpoints" / "step-00000008.ckpt")
    ours = saved["callbacks"]["StepCheckpoint"]
    assert ours == {
        "best_score": 1.0,
        "best_name": "step-00000008.ckpt",
        "kept": ["step-00000004.ckpt", "step-00000008.ckpt"],
        "permanent": [],
        "leaving": [],
    }
    theirs = next(v for k, v in saved["callbacks"].items() if "EarlyStopping" in k)
    assert theirs["best_score"].item() == 1.0


def test_the_sanity_check_and_trainer_validate_save_nothing(tmp_path):
    module = Foreign(steps=8)
    trainer = make_trainer([ValidateEvery(100), StepCheckpoint(100)], tmp_path, **VAL, num_sanity_val_steps=1)
    trainer.validate(module, verbose=False)
    assert not (tmp_path / "checkpoints").exists()
    trainer.fit(module)
    assert files(tmp_path) == ["step-00000008.ckpt"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_last_file_of_a_run_extends_it(tmp_path, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    straight = fit([], tmp_path, module=Foreign(steps=10), steps=10, **options)[1]
    fit([StepCheckpoint(100)], tmp_path, module=Foreign(steps=5), steps=5, **options)  # saved in on_train_end
    path = tmp_path / "checkpoints" / "last.ckpt"
    more = fit([StepCheckpoint(100)], tmp_path, module=Foreign(steps=10), steps=10, resume=path, **options)[1]
    assert more.seen == straight.seen[5 * accumulate :]


def test_a_resumed_run_remembers_the_best_and_goes_on_deleting(tmp_path):
    def run(steps, losses, resume=None):
        module = Foreign(steps=steps, val_losses=losses)
        callbacks = [ValidateEvery(2), StepCheckpoint(2)]
        return fit(callbacks, tmp_path, module=module, steps=steps, resume=resume, **VAL)[0]

    run(6, [1.0, 2.0, 3.0])
    assert files(tmp_path) == [f"step-{k:08d}.ckpt" for k in (2, 4, 6)]
    trainer = run(10, [1.5, 1.2], tmp_path / "checkpoints" / "last.ckpt")
    assert files(tmp_path) == [f"step-{k:08d}.ckpt" for k in (2, 8, 10)]
    assert link(tmp_path, "best") == "step-00000002.ckpt"
    assert trainer.checkpoint_callback.best_model_score.item() == 1.0


def test_resuming_does_not_save_the_same_step_again(tmp_path):
    fit([StepCheckpoint(4, monitor=None)], tmp_path, module=Foreign(steps=8), steps=8)
    path = tmp_path / "checkpoints" / "step-00000004.ckpt"
    before = path.stat().st_mtime_ns
    fit([StepCheckpoint(4, monitor=None)], tmp_path, module=Foreign(steps=5), steps=5, resume=path)
    assert path.stat().st_mtime_ns == before
    assert link(tmp_path, "last") == "step-00000005.ckpt"


def test_a_branch_into_a_new_folder_has_a_best_of_its_own_and_leaves_the_old_alone(tmp_path):
    module = Foreign(steps=4, val_losses=[1.0, 2.0])
    fit([ValidateEvery(2), StepCheckpoint(2)], tmp_path, module=module, steps=4, **VAL)
    old = {name: (tmp_path / "checkpoints" / name).stat().st_mtime_ns for name in files(tmp_path)}
    branch = StepCheckpoint(2, keep_last=1, dirpath=str(tmp_path / "branch"))
    module = Foreign(steps=8, val_losses=[5.0, 6.0])
    path = tmp_path / "checkpoints" / "last.ckpt"
    fit([ValidateEvery(2), branch], tmp_path, module=module, steps=8, resume=path, **VAL)
    assert os.readlink(tmp_path / "branch" / "best.ckpt") == "step-00000006.ckpt"
    assert branch.best_model_score.item() == 5.0
    assert old == {name: (tmp_path / "checkpoints" / name).stat().st_mtime_ns for name in files(tmp_path)}


def test_files_of_others_in_the_folder_are_not_deleted(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.ckpt").write_text("mine")
    fit([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, steps=8)
    assert files(tmp_path) == ["step-00000001.ckpt", "step-00000008.ckpt"]


def test_an_older_file_is_deleted_only_after_the_next_is_saved(tmp_path):
    class Full(Exception): ...

    trainer = make_trainer([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path)
    save = trainer.save_checkpoint

    def failing(path, *args, **kwargs):
        if trainer.global_step == 6:
            raise Full
        save(path, *args, **kwargs)

    trainer.save_checkpoint = failing
    with pytest.raises(Full):
        trainer.fit(Foreign(steps=8))
    assert files(tmp_path) == ["step-00000004.ckpt"]
    assert link(tmp_path, "last") == "step-00000004.ckpt"


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_save_that_lightning_gives_up_with_a_warning_deletes_nothing(tmp_path, monkeypatch, in_thread):
    """From step 5 on the disk refuses: Lightning's TorchCheckpointIO warns of a PermissionError and returns."""

    class Refuses(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if checkpoint["global_step"] < 5:
                super().save_checkpoint(checkpoint, path, storage_options)

    callback = StepCheckpoint(1, keep_last=2, monitor=None)
    plugin = AsyncCheckpointIO(Refuses()) if in_thread else Refuses()
    with pytest.warns(UserWarning, match=r"step-00000008\.ckpt was not written"):
        fit([callback], tmp_path, steps=8, plugins=[plugin])
    assert files(tmp_path) == ["step-00000003.ckpt", "step-00000004.ckpt"]
    assert link(tmp_path, "last") == "step-00000004.ckpt" and callback.last_save_failed


def test_a_file_that_ends_too_early_is_no_checkpoint(tmp_path):
    class Cuts(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path, storage_options)
            if checkpoint["global_step"] == 4:
                os.truncate(path, os.path.getsize(path) // 2)

    with pytest.warns(UserWarning, match="was not written"):
        fit([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, steps=4, plugins=[Cuts()])
    assert link(tmp_path, "last") == "step-00000002.ckpt"


def test_the_file_of_another_run_is_not_taken_for_a_save_and_not_replaced_without_a_word(tmp_path):
    other = tmp_path / "checkpoints" / "step-00000004.ckpt"
    other.parent.mkdir()
    other.write_text("of another run")
    with pytest.warns(UserWarning, match=r"step-00000004\.ckpt was there before this run"):
        fit([StepCheckpoint(2, keep_last=1, monitor=None)], tmp_path, steps=4)
    assert link(tmp_path, "last") == "step-00000004.ckpt" and torch.load(other, weights_only=True)["global_step"] == 4


def test_a_link_left_half_made_by_a_killed_process_does_not_matter(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt.tmp").symlink_to("nowhere")
    fit([StepCheckpoint(8, monitor=None)], tmp_path, steps=8)
    assert link(tmp_path, "last") == "step-00000008.ckpt"
    assert not Path(tmp_path / "checkpoints" / "last.ckpt.tmp").is_symlink()


def test_a_stop_inside_an_accumulation_window_waits_for_its_end(tmp_path):
    class StopAtMicroBatch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 9:  # the second of the four micro-batches of step 3
                trainer.should_stop = True

    callbacks = [StopAtMicroBatch(), StepCheckpoint(100, monitor=None)]
    _, stopped, _ = fit(callbacks, tmp_path, accumulate_grad_batches=4)
    assert len(stopped.seen) == 12
    assert files(tmp_path) == ["step-00000003.ckpt"]
    straight = fit([], tmp_path, accumulate_grad_batches=4)[1]
    path = tmp_path / "checkpoints" / "last.ckpt"
    resumed = fit([StepCheckpoint(100, monitor=None)], tmp_path, accumulate_grad_batches=4, resume=path)[1]
    assert stopped.seen + resumed.seen == straight.seen


def test_validation_inside_an_accumulation_window_saves_nothing_and_warns_once(tmp_path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None, **VAL}
    with pytest.warns(UserWarning, match="Validation ran inside an accumulation window") as caught:
        fit([StepCheckpoint(100)], tmp_path, **options)  # micro-batches 3, 9 and 15 are mid-window; 6 and 12 are not
    assert sum("Validation ran inside an accumulation window" in str(w.message) for w in caught) == 1
    assert {"step-00000008.ckpt"} < set(files(tmp_path)) <= {f"step-{k:08d}.ckpt" for k in (3, 6, 8)}


class OtherName(Foreign):
    """Logs its validation loss under another name."""

    def __init__(self, name, **kwargs):
        super().__init__(**kwargs)
        self.name = name

    def log(self, name, *args, **kwargs):
        super().log(self.name, *args, **kwargs)


@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize(
    ("monitor", "logged", "best"), [("val/loss", "val_loss", 4), ("val/loss", "top1", 0), ("f1", "val/loss", 0)]
)
def test_another_name_of_the_loss_is_found_and_training_goes_on_without_a_best(tmp_path, monitor, logged, best, sanity):
    said = []

    class Note(Callback):
        def on_train_start(self, *args):
            said.append(len(caught))

    module = OtherName(logged, val_losses=[2.0, 3.0])
    callbacks = [ValidateEvery(4), StepCheckpoint(4, monitor=monitor), Note()]
    with pytest.warns(UserWarning, match=f"monitors '{monitor}' .*{logged}.* \\(monitor of StepCheckpoint") as caught:
        trainer, *_ = fit(callbacks, tmp_path, module=module, num_sanity_val_steps=sanity, **VAL)
    assert sum("StepCheckpoint monitors" in str(w.message) for w in caught) == 1
    assert any("StepCheckpoint monitors" in str(w.message) for w in list(caught)[: said[0]]) == bool(sanity)
    assert trainer.global_step == 8
    found = tmp_path / "checkpoints/best.ckpt"
    assert os.readlink(found) == f"step-{best:08d}.ckpt" if best else not found.exists()


def test_fast_dev_run_writes_nothing(tmp_path):
    fit([StepCheckpoint(1)], tmp_path, fast_dev_run=2)
    assert not (tmp_path / "checkpoints").exists()
