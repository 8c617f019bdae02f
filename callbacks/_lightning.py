"""Functions around Lightning's internals, and the rules about steps and rows that all callbacks share.

Only this file of the folder uses private attributes of Lightning or replaces its methods. Written for lightning 2.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from .contracts import HearsOfInterruption, offered
from .errors import UserError, without

C = TypeVar("C", bound=Callback)


# -- rows ---------------------------------------------------------------------------------------------------------------


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether a row of metrics is logged at optimizer step `step`: at step 1 and multiples of `Trainer(log_every_n_steps)`."""
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (step == 1 or step % every == 0)


SHOWN_FIRST = {"train/loss": "Loss/train", "val/loss": "Loss/validation"}
"""Metric → second TensorBoard tag of its value. TensorBoard sorts tag groups, capitals first, and opens the first two."""


def write_row(trainer: Trainer, row: Mapping[str, float], step: int, tensorboard: Mapping[str, float] | None = None) -> None:
    """Write `row` (metric name → value) to every logger at optimizer step `step`, and to `trainer.callback_metrics`.

    Lightning's `self.log` would cost 0.5 ms a value, and would log the values one step too early on the x-axis.

    Args:
        tensorboard: values that TensorBoardLoggers write instead of `row`. None: `row` and the second tags of `SHOWN_FIRST`.
    """
    if tensorboard is None:
        tensorboard = {**row, **{tag: row[name] for name, tag in SHOWN_FIRST.items() if name in row}}
    for logger in trainer.loggers:
        logger.log_metrics(dict(tensorboard if isinstance(logger, TensorBoardLogger) else row), step=step)
    set_metrics(trainer, row, step)


_metric_steps: WeakKeyDictionary[Trainer, dict[str, int | None]] = WeakKeyDictionary()


def set_metrics(trainer: Trainer, row: Mapping[str, float], step: int | None) -> None:
    """Copy a row into `trainer.callback_metrics`. Store for `metric_step` the step at which it was measured (None: unknown)."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})
    _metric_steps.setdefault(trainer, {}).update(dict.fromkeys(row, step))


def metric_step(trainer: Trainer, name: str | None) -> int | None:
    """The optimizer step at which the value of `name` in `trainer.callback_metrics` was measured; None: unknown."""
    return None if name is None else _metric_steps.get(trainer, {}).get(name)


class _AfterSteps(Callback):
    """Base class of callbacks: calls the subclass's `_after_step(trainer, pl_module, step)` after each optimizer step."""

    _step = 0  # the last optimizer step handled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step != self._step:
            self._step = step
            self._after_step(trainer, pl_module, step)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        raise NotImplementedError


# -- replacing methods --------------------------------------------------------------------------------------------------


class _Layers:
    """Callable that `wrap` puts in the place of an object's method. Calls the method through wrapper functions, the layers."""

    def __init__(self, method: Callable[..., Any], replaced: bool) -> None:
        functools.update_wrapper(self, method)  # also copies attributes: torch's schedulers set one on `optimizer.step`
        self.method = method
        self.replaced = replaced  # the method was already an attribute of the object, not of its class
        self.layers: list[Callable[..., Any]] = []
        self.call = method

    def set(self, layers: list[Callable[..., Any]]) -> None:
        self.layers, self.call = layers, self.method
        for layer in layers:
            self.call = partial(layer, self.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def wrap(owner: Any, name: str, layer: Callable[..., Any]) -> Callable[[], None]:
    """Make `owner.name(*args)` call `layer(inner, *args)`, where `inner` is the method without this layer.

    Of several layers of one method, the newest is called first. Returns the function that removes the layer. Layers can be
    removed in any order; a second call of that function does nothing.
    """
    method = getattr(owner, name)
    layers = method if isinstance(method, _Layers) else _Layers(method, name in vars(owner))
    setattr(owner, name, layers)
    mine = partial(layer)  # a distinct object, even if the same layer is added twice
    layers.set([*layers.layers, mine])

    def undo() -> None:
        layers.set([each for each in layers.layers if each is not mine])
        if not layers.layers and vars(owner).get(name) is layers:  # otherwise it was replaced again, and calls pass through
            if layers.replaced:
                setattr(owner, name, layers.method)
            else:
                delattr(owner, name)

    return undo


def _undo_all(undo: Iterable[Callable[[], None]]) -> None:
    for each in undo:
        each()


class _PutsBack(Callback):
    """Base class of callbacks that replace methods or register hooks. At the end or after an exception, it calls the functions
    in `_undo`, by which the subclass restores the methods and removes the hooks."""

    _undo: tuple[Callable[[], None], ...] = ()

    def _put_back(self) -> None:
        undo, self._undo = self._undo, ()
        _undo_all(undo)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._put_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._put_back()


# -- accumulation -------------------------------------------------------------------------------------------------------


def accumulates(trainer: Trainer) -> bool:
    """Whether the current micro-batch is not the last one of its optimizer step."""
    return trainer.fit_loop._should_accumulate()


def micro_batches_begun(trainer: Trainer) -> int:
    """Number of micro-batches begun so far, with the current one, over all epochs and resumes."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def set_accumulation_window(trainer: Trainer, is_full: Callable[[], bool], position: Callable[[], int]) -> Callable[[], None]:
    """Replace Lightning's rules for when to step and when to zero gradients. Returns the function that undoes the replacement.

    Args:
        is_full: whether the current micro-batch completes the optimizer step.
        position: number of the current micro-batch in its optimizer step, from 0. Gradients are zeroed before number 0.
    """
    loop = trainer.fit_loop.epoch_loop

    def zero_grad(inner: Callable[..., Any], batch_idx: int, optimizer: Any) -> Any:
        return inner(position(), optimizer)  # Lightning zeroes where this is 0 modulo accumulate_grad_batches

    undo = [
        wrap(loop, "_accumulated_batches_reached", lambda inner: is_full()),
        wrap(loop.automatic_optimization, "_make_zero_grad_fn", zero_grad),
    ]
    return partial(_undo_all, undo)


# -- validation ---------------------------------------------------------------------------------------------------------


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates right after this on_train_batch_end. Calls the test that Lightning itself will call."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = loop.val_loop.max_batches  # of each loader; none are known before the first validation
    return fetcher is not None and loop._should_check_val_fx(fetcher) and (not batches or sum(batches) > 0)


def skip_next_validation(trainer: Trainer) -> None:
    """Skip the validation that would follow this on_train_batch_end."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def validate_when_resuming(trainer: Trainer) -> None:
    """Make the resumed run begin with the validation of the checkpoint's step, if this validation is due.

    Call in on_train_start; a second call is harmless. Lightning itself skips this validation if the checkpoint was saved
    after the step and before the validation.
    """
    loop = trainer.fit_loop.epoch_loop
    validation = loop.val_loop

    def begin_with_validation(inner: Callable[..., Any], fetcher: Any) -> None:
        undo()
        inner(fetcher)
        if not loop._should_check_val_fx(fetcher):  # tested here, after the on_train_start of all callbacks
            return
        if validation.restarted_mid_evaluation and not validation.restarting:
            return
        # Like Lightning's restart of an interrupted validation, but from its first batch.
        validation.restarting = False
        validation._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        loop._batches_that_stepped -= 1  # otherwise counted before and after the validation

    undo = wrap(loop, "on_run_start", begin_with_validation)


def enter_finished_fit(trainer: Trainer, is_due: Callable[[], bool]) -> Callable[[], None]:
    """Make `fit` enter its loop although `max_steps` is reached, if a validation is due. Returns the function that undoes this.

    Call in on_fit_start. `is_due` is called later, when every strategy has restored the state of callbacks. The loop validates
    (:func:`validate_when_resuming`) and ends without a training step. If no validation runs, for example with
    `limit_val_batches=0`, the loop ends at once.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    validates = False

    def raise_limit_by(steps: int) -> None:
        loop.max_steps += steps

    def setup_data(inner: Callable[[], Any]) -> None:  # the last call of `fit` before it tests max_steps
        leave()
        inner()
        if not is_due() or loop.max_steps == -1 or loop.global_step < loop.max_steps:
            return
        raise_limit_by(1)
        undos.append(lambda: raise_limit_by(-1))
        undos.append(wrap(fit, "on_run_start", on_run_start))
        undos.append(wrap(loop.val_loop, "on_run_start", on_validation))
        undos.append(wrap(loop, "advance", advance))

    def leave() -> None:
        _undo_all(undos)
        undos.clear()

    def advance(inner: Callable[[Any], Any], fetcher: Any) -> None:  # trains, unless a validation follows
        nonlocal validates
        follows = loop.restarting and loop._should_check_val_fx(fetcher) and loop.val_loop.restarted_mid_evaluation
        if validates or not follows:
            leave()
            raise StopIteration
        validates = True
        inner(fetcher)

    def on_run_start(inner: Callable[[], Any]) -> None:
        raise_limit_by(-1)  # on_train_start hooks must see the original max_steps
        try:
            inner()
        finally:
            raise_limit_by(1)

    def on_validation(inner: Callable[[], Any]) -> None:
        leave()
        inner()

    undos: list[Callable[[], None]] = [wrap(fit, "setup_data", setup_data)]
    return leave


class ValidationInterrupted(Exception):
    """Raised in on_validation_batch_start to end a validation without a result; see :func:`interruptible_validation`."""


def interruptible_validation(trainer: Trainer) -> Callable[[], None]:
    """Make `fit` continue after :class:`ValidationInterrupted` as if the validation had not begun.

    Nothing is logged, and neither on_validation_epoch_end nor on_validation_end is called. Instead, callbacks with a method
    `on_validation_interrupted(trainer, pl_module)` are called. They may save a checkpoint there, so the call comes before
    Lightning ends the training epoch and advances the epoch counters. Returns the function that undoes this.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    loop = epoch_loop.val_loop

    def run(inner: Callable[[], Any]) -> Any:
        module = trainer.lightning_module
        hook, progress = module._current_fx_name, loop.batch_progress.state_dict()
        try:
            return inner()
        except ValidationInterrupted:
            module._current_fx_name = hook
            loop.batch_progress.load_state_dict(progress)
            loop._logged_outputs = []
            loop._on_evaluation_model_train()  # back to train mode
            trainer._logger_connector.reset_results()
            epoch_loop._batches_that_stepped += 1  # as in a checkpoint saved later; required by `validate_when_resuming`
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if hears := offered(callback, HearsOfInterruption):
                    hears.on_validation_interrupted(trainer, module)
            epoch_loop._batches_that_stepped -= 1
            return []

    return wrap(loop, "run", run)


def check_after_validation(callback: Callback) -> bool:
    """Make an EarlyStopping check after each validation, not at an epoch's end. Returns whether this changed `callback`."""
    if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end:
        callback._check_on_train_epoch_end = False
        return True
    return False


# -- the model between two steps ----------------------------------------------------------------------------------------


@contextmanager
def evaluation_mode(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Context manager: sets eval mode and enters `without_traces`. At its end, each submodule gets its former mode."""
    modes = [(module, module.training) for module in pl_module.modules()]
    try:
        pl_module.eval()
        with without_traces(trainer, pl_module):
            yield
    finally:
        for module, training in modes:  # per module: some may have been in eval mode before
            module.training = training


@contextmanager
def without_traces(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Context manager for forward passes without gradients, in validation's autocast. At its end, restores the random state.

    Calls `reshard` at its end, because FSDP2 leaves some weights gathered after a forward pass without a backward pass.
    """
    try:
        with isolate_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
            yield
    finally:
        reshard(pl_module)


def reshard(module: nn.Module) -> None:
    """Free the gathered weights that FSDP2 keeps in memory after a forward pass without a backward pass.

    Calls the method `reshard` of `module` and of every submodule that has this method, as FSDP2's modules do. A module that
    keeps FSDP2 modules outside its submodules, such as the stages of a pipeline, must define `reshard`.
    """
    for unit in module.modules():
        free = getattr(unit, "reshard", None)
        if callable(free):
            free()


# -- stopping and signals -----------------------------------------------------------------------------------------------


def stop_now(trainer: Trainer) -> Callable[[], None]:
    """Set `should_stop`. Clear `min_steps` and `min_epochs`, which delay the stop; the returned function restores these two."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    min_epochs, min_steps = fit.min_epochs, loop.min_steps
    fit.min_epochs = loop.min_steps = None
    trainer.should_stop = True

    def restore() -> None:
        fit.min_epochs, loop.min_steps = min_epochs, min_steps

    return restore


def note_sigterm_only(trainer: Trainer) -> Callable[[], None]:
    """Make Lightning's SIGTERM handler set a flag and nothing else. Returns the function that restores the original handler.

    The original handler also broadcasts the flag, which hangs if only one rank receives the signal.
    """
    connector = trainer._signal_connector

    def note(inner: Callable[..., Any], signum: int, frame: Any) -> None:
        connector.received_sigterm = True

    return wrap(connector, "_sigterm_notifier_fn", note)


def take_sigterm(trainer: Trainer) -> bool:
    """Whether Lightning's handler has received a SIGTERM since the last call. Clears the handler's flag."""
    received = trainer._signal_connector.received_sigterm
    trainer._signal_connector.received_sigterm = False
    return received


def without_sigterm_broadcast(trainer: Trainer) -> Callable[[], None]:
    """Remove Lightning's broadcast of a SIGTERM flag before every micro-batch. Returns a function that undoes the removal."""
    return wrap(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda inner: None)


# -- actions that the Trainer reports to its profiler -------------------------------------------------------------------

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
SAVE = "save_checkpoint"
VALIDATION = "validation"  # in `fit`; `listen` reports it, because the Trainer reports only actions within a validation
SAMPLES = "generate_samples"  # of TextSamples
TASKS = "score_tasks"  # of TaskScores
_ACTIONS = {FETCH: "data_stall", SAVE: "checkpoint", VALIDATION: "validation"}
_STRATEGY = {"training_step": "forward", "backward": "backward", "batch_to_device": "data_stall"}
_MODULE = {"optimizer_step": "optimizer", "optimizer_zero_grad": "optimizer"}


def part_of(action: str) -> str | None:
    """The part of training time, such as "forward", to which an action of the profiler belongs; None if there is none."""
    if action in _ACTIONS:
        return _ACTIONS[action]
    hook = action.rpartition(".")[2]
    if action.startswith("[Strategy]"):
        return _STRATEGY.get(hook)
    return _MODULE.get(hook) if action.startswith("[LightningModule]") else None


def is_optimizer_step(action: str) -> bool:
    """Whether the profiler's action `action` is the optimizer step with its closure (last micro-batch's forward, backward)."""
    return action.startswith("[LightningModule]") and action.endswith(".optimizer_step")


def listen(trainer: Trainer, started: Callable[[str], None], stopped: Callable[[str], None]) -> Callable[[], None]:
    """Call `started(action)` when an action begins and `stopped(action)` when it ends.

    The actions are `VALIDATION` and all that the Trainer reports to its profiler, by name; the profiler works as before.
    Several callbacks can listen at once, and stop listening in any order. Returns the function that stops listening.
    """
    profiler = trainer.profiler  # type: ignore[attr-defined]

    def start(inner: Callable[[str], None], action_name: str) -> None:
        inner(action_name)
        started(action_name)

    def stop(inner: Callable[[str], None], action_name: str) -> None:
        stopped(action_name)
        inner(action_name)

    def validate(inner: Callable[[], Any]) -> Any:
        started(VALIDATION)
        try:
            return inner()
        finally:
            stopped(VALIDATION)

    loop = trainer.fit_loop.epoch_loop.val_loop
    undo = [wrap(profiler, "start", start), wrap(profiler, "stop", stop), wrap(loop, "run", validate)]
    return partial(_undo_all, undo)


# -- callbacks, ranks ----------------------------------------------------------------------------------------------------


def callback_of(trainer: Trainer, kind: type[C]) -> C | None:
    """The trainer's first callback of the class `kind`; None if the trainer has no callback of this class."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)  # type: ignore[attr-defined]


def shards_otherwise(trainer: Trainer) -> bool:
    """Whether the strategy is FSDP1, whose shards are not DTensors, or DeepSpeed, whose parameters have no `grad`."""
    return isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy)


def refuse_other_shards(trainer: Trainer, callback: type[Callback]) -> None:
    """Refuse a strategy that shards parameters, but not as DTensors: `callback` would take a rank's shard for the whole tensor.

    Raises:
        UserError: The strategy is FSDP1 or DeepSpeed.
    """
    if shards_otherwise(trainer):
        raise UserError(
            f"{callback.__name__} reads shards of DTensors, and {type(trainer.strategy).__name__} makes others: use"
            f" Lightning's ModelParallelStrategy (FSDP2), or {without(callback)}."
        )


def data_parallel(trainer: Trainer) -> tuple[int, int]:
    """(rank, number of ranks) along the data-parallel axis. The ranks of a tensor-parallel group have equal pairs and data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return (sampler["rank"], sampler["num_replicas"]) if sampler else (trainer.global_rank, trainer.world_size)
