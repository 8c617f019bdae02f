import pytest
from foreign import Foreign, fit, make_trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lit_llm.callbacks import ValidateEvery

VAL = {"limit_val_batches": 1.0}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 8]), (4, [4, 8]), (1, list(range(1, 9))), (100, [8])])
def test_validation_runs_after_every_n_optimizer_steps_and_the_last(tmp_path, accumulate, every, expected):
    module = fit([ValidateEvery(every)], tmp_path, accumulate_grad_batches=accumulate, **VAL)[1]
    assert module.validated == expected


def test_limit_val_batches_zero_turns_validation_off(tmp_path):
    module = fit([ValidateEvery(2)], tmp_path, limit_val_batches=0)[1]
    assert module.validated == []


def test_a_run_that_ends_with_its_data_is_validated_at_the_end(tmp_path):
    module = Foreign(steps=5)
    trainer = make_trainer([ValidateEvery(2)], tmp_path, steps=-1, **VAL)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module)
    assert trainer.global_step == 5
    assert module.validated == [2, 4, 5]


@pytest.mark.parametrize("order", ["before", "after"])
def test_early_stopping_looks_after_each_validation_wherever_it_stands_in_the_list(tmp_path, order):
    stop = EarlyStopping("val/loss", patience=1)
    callbacks = [stop, ValidateEvery(2)] if order == "before" else [ValidateEvery(2), stop]
    module = Foreign(steps=20, val_losses=[3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 3.2])
    trainer, _, _ = fit(callbacks, tmp_path, module=module, steps=20, **VAL)
    assert module.validated == [2, 4, 6]  # best at 4; patience 1 stops at the next one that does not improve
    assert trainer.global_step == 6


def test_a_run_that_is_asked_to_stop_is_validated_once_more(tmp_path):
    class StopAtFive(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 5

    module = fit([ValidateEvery(4), StopAtFive()], tmp_path, **VAL)[1]
    assert module.validated == [4, 5]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("when", "saved"),
    [("after the step", 3), ("after the step", 4), ("after the step", 5), ("after the validation", 4)],
)
def test_a_resumed_run_makes_every_validation_that_was_not_made_before_the_save_and_at_the_same_x(
    tmp_path, accumulate, saved, when
):
    class Save(Callback):
        def _save(self, trainer):
            if trainer.global_step == saved and not trainer.fit_loop._should_accumulate():
                trainer.save_checkpoint(tmp_path / "x.ckpt")

        def on_train_batch_end(self, trainer, *args):
            if when == "after the step":
                self._save(trainer)

        def on_validation_end(self, trainer, *args):
            if when == "after the validation":
                self._save(trainer)

    options = {"accumulate_grad_batches": accumulate, **VAL}
    _, straight, rows = fit([ValidateEvery(4), Save()], tmp_path, steps=10, module=Foreign(steps=10), **options)
    _, resumed, rows_resumed = fit(
        [ValidateEvery(4)], tmp_path, steps=10, module=Foreign(steps=10), resume=tmp_path / "x.ckpt", **options
    )
    assert straight.validated == [4, 8, 10]
    assert resumed.validated == [step for step in [4, 8, 10] if step > saved or (step == saved and when == "after the step")]
    assert resumed.seen == straight.seen[saved * accumulate :]
    assert rows_resumed == {x: rows[x] for x in list(rows)[-len(resumed.validated) :]}  # at the same x, the same values


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"val_check_interval": 3}, r"remove Trainer\(val_check_interval\), or remove ValidateEvery\."),
        ({"val_check_interval": 0.5}, r"remove Trainer\(val_check_interval\)"),
        ({"val_check_interval": "00:00:01:00"}, r"remove Trainer\(val_check_interval\)"),
        ({"check_val_every_n_epoch": 2}, r"remove Trainer\(check_val_every_n_epoch\)"),
    ],
)
def test_a_second_source_of_validation_is_refused(tmp_path, options, flag):
    with pytest.raises(ValueError, match=flag):
        fit([ValidateEvery(2)], tmp_path, **options)
