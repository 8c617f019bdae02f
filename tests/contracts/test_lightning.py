# ruff: noqa: E731
"""What `callbacks/_lightning.py` and `lit_llm/core/_lightning.py` promise, tested on the installed Lightning, name by name.

A failure means that this version of Lightning changed something that we rely on; the test's name says what.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lit_llm.callbacks import _lightning as internals
from lit_llm.core import _lightning as package


class Module(LightningModule):
    """A linear model on constant data: four micro-batches an epoch, two validation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.trainer.global_step, batch_idx))
        self.log("val", self.layer(batch).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))

    def val_dataloader(self):
        return DataLoader(torch.ones(2, 1))


class Hooks(Callback):
    """Calls functions of the trainer in hooks."""

    def __init__(self, **hooks: Any) -> None:
        for name, call in hooks.items():
            setattr(self, name, lambda trainer, *args, call=call: call(trainer))


def fit(tmp_path, *, resume=None, module=None, steps=4, **options) -> Trainer:
    hooks = Hooks(**{name: options.pop(name) for name in list(options) if name.startswith("on_")})
    defaults = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1, "logger": False}
    defaults |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=steps, default_root_dir=tmp_path, callbacks=[hooks], **(defaults | options))
    trainer.fit(module or Module(), ckpt_path=resume)
    return trainer


# -- accumulation: _should_accumulate, _accumulated_batches_reached, _make_zero_grad_fn, batch_progress -----------------


def test_should_accumulate_is_true_before_the_last_micro_batch_of_a_step_and_false_at_it(tmp_path):
    seen = []
    fit(tmp_path, steps=2, accumulate_grad_batches=2, on_train_batch_end=lambda t: seen.append(internals.accumulates(t)))
    assert seen == [True, False, True, False]


def test_batch_progress_counts_micro_batches_from_one_in_on_train_batch_start(tmp_path):
    seen = []
    fit(tmp_path, on_train_batch_start=lambda t: seen.append(internals.micro_batches_begun(t)))
    assert seen == [1, 2, 3, 4]


def test_a_replaced_accumulation_window_decides_when_lightning_steps_and_zeroes_gradients(tmp_path):
    grads, steps = [], []

    def start(trainer):
        trainer.accumulate_grad_batches = 8  # the loss is divided by it
        begun = lambda: internals.micro_batches_begun(trainer)
        internals.set_accumulation_window(trainer, lambda: begun() in (1, 4), lambda: {1: 0, 2: 0, 3: 1, 4: 2}[begun()])

    def end(trainer):
        grads.append(trainer.lightning_module.layer.weight.grad.item())
        steps.append(trainer.global_step)

    fit(tmp_path, steps=-1, max_epochs=1, on_train_start=start, on_train_batch_end=end)
    assert grads == [1 / 8, 1 / 8, 2 / 8, 3 / 8] and steps == [1, 1, 1, 2]


# -- validation: _data_fetcher, _should_check_val_fx, _skip_next_val, _restart_stage, _batches_that_stepped, … ----------


@pytest.mark.parametrize("interval", [2, 3])
def test_should_check_val_fx_answers_in_on_train_batch_end_what_lightning_does_next(tmp_path, interval):
    follows, module = [], Module()

    def end(trainer):
        if internals.validation_follows(trainer):
            follows.append(trainer.global_step)

    options = {"val_check_interval": interval, "limit_val_batches": 2, "on_train_batch_end": end}
    fit(tmp_path, module=module, **options)
    assert follows == sorted({step for step, _ in module.validated}) == {2: [2, 4], 3: [3]}[interval]


def test_a_validation_is_foreseen_before_the_first_one_has_opened_its_loaders(tmp_path):
    follows = []
    end = lambda trainer: internals.validation_follows(trainer) and follows.append(trainer.global_step)
    options = {"limit_train_batches": 2, "check_val_every_n_epoch": 2, "limit_val_batches": 2}
    fit(tmp_path, module=Module(), on_train_batch_end=end, **options)
    assert follows == [4]


def test_skip_next_val_leaves_out_one_validation(tmp_path):
    module = Module()
    end = lambda trainer: trainer.global_step == 1 and internals.skip_next_validation(trainer)
    fit(tmp_path, module=module, val_check_interval=1, limit_val_batches=1, on_train_batch_end=end)
    assert [step for step, _ in module.validated] == [2, 3, 4]


def test_a_restart_stage_of_mid_evaluation_begins_a_resumed_run_with_the_whole_validation(tmp_path):
    checkpoint = tmp_path / "x.ckpt"
    before, after, counts, stages = Module(), Module(), {}, []
    save = lambda trainer: trainer.global_step == 2 and trainer.save_checkpoint(checkpoint)
    count = lambda of: lambda trainer: of.append(trainer.fit_loop.epoch_loop._batches_that_stepped)
    options = {"val_check_interval": 2, "limit_val_batches": 2}
    counts["straight"], counts["resumed"] = [], []
    fit(tmp_path, module=before, on_train_batch_end=save, on_validation_end=count(counts["straight"]), **options)

    def start(trainer):
        stages.append(trainer.fit_loop.epoch_loop.restarted_on_train_batch_end)
        internals.validate_when_resuming(trainer)
        internals.validate_when_resuming(trainer)  # twice is once

    fit(tmp_path, module=after, resume=checkpoint, on_train_start=start, on_validation_end=count(counts["resumed"]), **options)
    assert stages == [True]
    assert before.validated == after.validated == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert counts["straight"] == counts["resumed"]  # the x-axis of self.log
    assert RestartStage.RESTARTED_MID_EVALUATION == "restarted_mid_evaluation"


def test_a_finished_fit_can_be_entered_for_a_validation_and_makes_no_step(tmp_path):
    checkpoint = tmp_path / "x.ckpt"
    save = lambda trainer: trainer.global_step == 4 and trainer.save_checkpoint(checkpoint)
    fit(tmp_path, val_check_interval=4, limit_val_batches=2, on_train_batch_end=save)
    module, limits = Module(), []
    trainer = fit(
        tmp_path,
        module=module,
        resume=checkpoint,
        val_check_interval=4,
        limit_val_batches=2,
        on_fit_start=lambda trainer: internals.enter_finished_fit(trainer, lambda: True),
        on_train_start=lambda trainer: (limits.append(trainer.max_steps), internals.validate_when_resuming(trainer)),
        on_validation_end=lambda trainer: limits.append(trainer.max_steps),
    )
    assert module.validated == [(4, 0), (4, 1)] and trainer.global_step == trainer.max_steps == 4 and limits == [4, 4]
    assert "setup_data" not in vars(trainer.fit_loop) and "on_run_start" not in vars(trainer.fit_loop)


def test_an_interrupted_validation_leaves_the_trainer_training_without_its_results(tmp_path):
    """_current_fx_name, _logged_outputs, _on_evaluation_model_train, _logger_connector.reset_results."""
    module, ended = Module(), []

    def interrupt(trainer):
        if trainer.global_step == 2 and len(module.validated) == 1:
            raise internals.ValidationInterrupted

    trainer = fit(
        tmp_path,
        module=module,
        val_check_interval=2,
        limit_val_batches=2,
        on_train_start=internals.interruptible_validation,
        on_validation_batch_start=interrupt,
        on_validation_end=lambda trainer: ended.append(trainer.global_step),
        on_train_batch_start=lambda trainer: ended.append(module.training),
    )
    assert module.validated == [(2, 0), (4, 0), (4, 1)] and ended == [True, True, True, True, 4]
    assert trainer.global_step == 4 and "val" in trainer.callback_metrics
    assert module._current_fx_name is None


def test_early_stopping_looks_after_validation_when_its_private_flag_is_false(tmp_path):
    stop = EarlyStopping("val")
    assert internals.check_after_validation(stop) is False  # not set up yet
    trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False, callbacks=[stop], check_val_every_n_epoch=1)
    stop.setup(trainer, Module(), "fit")
    assert stop._check_on_train_epoch_end is True, "EarlyStopping no longer assumes the end of an epoch"
    assert internals.check_after_validation(stop) is True and stop._check_on_train_epoch_end is False


# -- signals: _signal_connector, _sigterm_notifier_fn, _broadcast_sigterm_tensor ---------------------------------------


def test_lightnings_handler_of_sigterm_only_sets_the_flag(tmp_path):
    seen = []

    def start(trainer):
        signal.raise_signal(signal.SIGTERM)
        seen.extend([internals.take_sigterm(trainer), internals.take_sigterm(trainer)])

    class Early(Module):
        def setup(self, stage):
            internals.note_sigterm_only(self.trainer)

    trainer = fit(tmp_path, module=Early(), on_train_start=start)
    assert seen == [True, False] and trainer.global_step == 4


def test_stop_now_stops_before_min_steps(tmp_path):
    restore = []
    stop = lambda trainer: trainer.global_step == 2 and restore.append(internals.stop_now(trainer))
    trainer = fit(tmp_path, min_steps=4, min_epochs=1, on_train_batch_end=stop)
    assert trainer.global_step == 2
    restore[0]()
    assert trainer.min_steps == 4 and trainer.min_epochs == 1


# -- what the Trainer announces ----------------------------------------------------------------------------------------


def test_the_trainer_announces_every_part_of_a_step_in_order(tmp_path):
    heard = []

    def start(trainer):
        started = lambda action: heard.append(("+", action))
        internals.listen(trainer, started, lambda action: heard.append(("-", action)))

    save = lambda trainer: trainer.save_checkpoint(tmp_path / "x.ckpt")
    fit(tmp_path, steps=1, on_train_start=start, on_train_batch_end=save)
    begun = [action for sign, action in heard if sign == "+"]
    parts = [part for action in begun if (part := internals.part_of(action))]
    # The optimizer step holds the closure.
    assert parts == ["data_stall", "data_stall", "optimizer", "forward", "optimizer", "backward", "checkpoint"]
    assert {internals.part_of(action) for action in begun} >= {"forward", "backward", "optimizer", "data_stall"}
    assert internals.FETCH in begun and internals.SAVE in begun
    assert [action for action in begun if internals.is_optimizer_step(action)] == ["[LightningModule]Module.optimizer_step"]


def test_each_validation_is_announced(tmp_path):
    heard, module = [], Module()
    note = lambda action: heard.append(len(module.validated)) if action == internals.VALIDATION else None
    start = lambda trainer: internals.listen(trainer, note, note)
    fit(tmp_path, module=module, val_check_interval=2, limit_val_batches=2, on_train_start=start)
    assert heard == [0, 2, 2, 4]


# -- replacing methods -------------------------------------------------------------------------------------------------


class Owner:
    def double(self, x):
        return 2 * x


def test_layers_are_undone_in_any_order_and_leave_the_object_as_it_was():
    for first, second in ((0, 1), (1, 0)):
        owner = Owner()
        plus = lambda inner, x: inner(x) + 1
        undo = [internals.wrap(owner, "double", plus), internals.wrap(owner, "double", plus)]
        assert owner.double(3) == 8
        undo[first]()
        undo[first]()
        assert owner.double(3) == 7
        undo[second]()
        assert owner.double(3) == 6 and vars(owner) == {}


def test_a_method_replaced_by_others_before_or_since_stays_theirs():
    owner = Owner()
    owner.double = theirs = lambda x: -x
    undo = internals.wrap(owner, "double", lambda inner, x: inner(x) + 1)
    assert owner.double(3) == -2
    undo()
    assert owner.double is theirs
    undo = internals.wrap(owner, "double", lambda inner, x: inner(x) + 1)
    ours = owner.double
    owner.double = lambda x: 10 * ours(x)
    undo()
    assert owner.double(3) == -30


# -- lit_llm/core/_lightning.py ---------------------------------------------------------------------------------------------


def test_a_module_without_a_trainer_has_none_and_one_with_a_trainer_has_it(tmp_path):
    module = Module()
    assert package.trainer_of(module) is None
    trainer = fit(tmp_path, steps=1, module=module)
    assert package.trainer_of(module) is trainer


def test_max_steps_of_the_epoch_loop_ends_training(tmp_path):
    trainer = fit(tmp_path, steps=4, on_fit_start=lambda trainer: package.set_max_steps(trainer, 3))
    assert trainer.global_step == trainer.max_steps == 3


def test_values_of_self_log_reach_the_logger_at_the_number_of_optimizer_steps(tmp_path):
    class Logging(Module):
        def training_step(self, batch, batch_idx):
            self.log("batch", float(batch_idx))
            return super().training_step(batch, batch_idx)

    def rows(patched: bool) -> list[tuple[int, str]]:
        logger = CSVLogger(tmp_path)
        trainer = Trainer(
            max_steps=2,
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            val_check_interval=4,
            num_sanity_val_steps=0,
            accelerator="cpu",
            devices=1,
            logger=logger,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        if patched:
            package.log_at_optimizer_steps(trainer)
        written = []
        logger.log_metrics = lambda metrics, step=None: written.append((step, set(metrics)))
        trainer.fit(Logging())
        return [(step, name) for step, names in written for name in sorted(names & {"batch", "val"})]

    assert rows(patched=False) == [(0, "batch"), (1, "batch"), (1, "val")]  # what Lightning does
    assert rows(patched=True) == [(1, "batch"), (2, "batch"), (2, "val")]


def test_the_number_of_micro_batches_made_decides_where_accumulation_begins_after_a_resume(tmp_path):
    """_ProcessedTracker, and that a window is full where `current.ready` is a multiple of accumulate_grad_batches."""
    checkpoint = tmp_path / "x.ckpt"
    save = lambda trainer: trainer.global_step == 1 and trainer.save_checkpoint(checkpoint)
    fit(tmp_path, steps=1, on_train_batch_end=save)  # one micro-batch a step
    windows = []

    class Resumed(Module):
        def train_dataloader(self):
            package.set_micro_batches_made(self.trainer, lambda steps: 3 * steps)
            return DataLoader(torch.ones(12, 1))

    fit(
        tmp_path,
        steps=3,
        module=Resumed(),
        resume=checkpoint,
        accumulate_grad_batches=3,
        on_train_batch_end=lambda trainer: windows.append(trainer.global_step),
    )
    assert windows == [1, 1, 2, 2, 2, 3]
    names = ("ready", "started", "processed", "completed")
    assert all(hasattr(_ProcessedTracker(), name) for name in names), "the counters of _ProcessedTracker were renamed"


@pytest.mark.parametrize("place", ["optimizer_states", "combined_loader"])
def test_an_error_while_a_checkpoint_is_restored_is_told_from_one_of_a_step(place, tmp_path):
    """Names in _CheckpointConnector and _FitLoop."""
    checkpoint = tmp_path / "x.ckpt"

    class Loader(DataLoader):
        state_dict, load_state_dict = dict, lambda *_: None

    class Loads(Module):
        def train_dataloader(self):
            return Loader(torch.ones(4, 1))

    fit(tmp_path, steps=1, module=Loads(), on_train_batch_end=lambda trainer: trainer.save_checkpoint(checkpoint))
    content = torch.load(checkpoint, weights_only=True)
    (content if place in content else content["loops"]["fit_loop"]["state_dict"])[place] = -7
    torch.save(content, checkpoint)
    with pytest.raises(Exception) as raised:
        fit(tmp_path, steps=3, module=Loads(), resume=checkpoint)
    assert package.restores_checkpoint(raised.value)

    class Wrong(Module):
        def training_step(self, batch, batch_idx):
            return torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError) as raised:
        fit(tmp_path, steps=1, module=Wrong())
    assert not package.restores_checkpoint(raised.value)


def test_a_ddp_strategy_keeps_its_options():
    assert package.ddp_option(DDPStrategy(gradient_as_bucket_view=True), "gradient_as_bucket_view") is True
    assert package.ddp_option(DDPStrategy(), "gradient_as_bucket_view") is None


def test_an_fsdp_strategy_keeps_how_it_saves_and_checkpoints():
    assert package.saves_shards(FSDPStrategy(state_dict_type="sharded")) is True
    assert package.saves_shards(FSDPStrategy()) is False
    assert package.checkpoints_activations(FSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})) is True
    assert package.checkpoints_activations(FSDPStrategy()) is False


def test_a_model_parallel_strategy_uses_the_backend_and_the_mesh_that_are_set():
    strategy = ModelParallelStrategy()
    package.set_process_group_backend(strategy, "cpu:gloo,cuda:nccl")
    assert strategy.process_group_backend == strategy._get_process_group_backend() == "cpu:gloo,cuda:nccl"
    module, mesh = Module(), SimpleNamespace()
    strategy._lightning_module = module
    package.set_device_mesh(strategy, mesh)
    assert strategy.device_mesh is mesh and module.device_mesh is mesh


def test_two_ranks_deal_a_training_loader_out_in_its_own_order():
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    assert sampler_of(trainer, DataLoader(range(8))).shuffle  # what Lightning does
    package.keep_order_of_loaders(trainer)
    assert list(sampler_of(trainer, DataLoader(range(8)))) == [0, 2, 4, 6]  # of rank 0
    assert list(sampler_of(trainer, DataLoader(range(8), sampler=[7, 5, 3, 1]))) == [7, 3]
    assert sampler_of(trainer, DataLoader(range(8), shuffle=True)).shuffle


def sampler_of(trainer: Trainer, loader: DataLoader) -> Any:
    return data_connector._process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader).sampler


def test_what_is_done_before_connecting_comes_before_it_and_is_kept_until_then():
    order = []
    strategy = DDPStrategy()
    strategy.setup_environment = lambda: order.append("connects")

    class Kept:
        def __del__(self):
            order.append("is gone")

    package.before_connecting(strategy, Kept)
    strategy.setup_environment()
    assert order == ["connects", "is gone"]


def test_a_launched_process_that_fails_is_told_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(subprocess_script, "_launch_process_observer", None)
    ended = queue.Queue()
    package.watch_launched(lambda *told: ended.put(told))
    launcher = subprocess_script._SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    start = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])]
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: launcher.procs.extend(start))
    assert launcher.launch(lambda: "trained") == "trained" and ended.get(timeout=60) == (1, 3)
