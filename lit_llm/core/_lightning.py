"""Functions around Lightning's internals. `lit_llm.callbacks._lightning` has the functions that callbacks need.

No other module of lit_llm names an attribute of Lightning that begins with an underscore. This file is written for lightning
2.6; tests/contracts tests every function.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.data import _is_dataloader_shuffled
from torch.distributed.device_mesh import DeviceMesh

from lit_llm.callbacks._lightning import wrap


def trainer_of(module: LightningModule) -> Trainer | None:
    """The module's trainer; None if the module has no trainer, in which case `module.trainer` would raise."""
    return module._trainer


def set_max_steps(trainer: Trainer, steps: int) -> None:
    """Make `fit` end when `steps` optimizer steps are made, whatever `Trainer(max_steps)` says."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def log_at_optimizer_steps(trainer: Trainer) -> None:
    """Make loggers get values of `self.log` at `trainer.global_step`, as rows of callbacks. Lightning counts from 0."""

    def log(inner: Callable[..., None], metrics: dict[str, Any], step: int | None = None) -> None:
        fits = trainer.state.fn == "fit"
        if fits and step is None and "step" not in metrics:
            step = trainer.global_step
        inner(metrics, step)

    wrap(trainer._logger_connector, "log_metrics", log)


def set_micro_batches_made(trainer: Trainer, made_before: Callable[[int], int]) -> None:
    """In a resumed run, correct Lightning's counts of the micro-batches trained so far, which set where accumulation begins.

    The checkpoint's numbers disagree with the optimizer steps when a run resumes with another accumulation (other ranks or
    micro-batches), or from a checkpoint taken between two steps: the first step would then average over a part of a batch.

    Args:
        made_before: n → number of micro-batches in the first n optimizer steps, with the present accumulation.
    """
    loop, step, limit = trainer.fit_loop, trainer.global_step, trainer.limit_train_batches
    progress = loop.epoch_loop.batch_progress
    if not loop.restarting or not progress.total.ready:
        return
    total = made_before(step)
    of_epoch = total - made_before(step - progress.current.ready * step // progress.total.ready)
    limit = limit if isinstance(limit, int) else sys.maxsize  # 1.0: the run is one epoch
    if of_epoch > limit:  # the epochs were longer
        of_epoch = (of_epoch - 1) % limit + 1
    assert isinstance(progress.total, _ProcessedTracker) and isinstance(progress.current, _ProcessedTracker)  # have four counts
    if of_epoch == limit and progress.total.completed < progress.total.processed:
        # Saved in on_train_batch_end of an epoch's last batch: Lightning would go on without counting the next epoch.
        progress.is_last_batch = False
        loop.epoch_progress.increment_processed()
        loop.epoch_progress.increment_completed()
    for count, number in ((progress.total, total), (progress.current, of_epoch)):
        in_hook = min(number, count.processed - count.completed)  # 1 if saved while a batch's hooks ran
        count.ready = count.started = count.processed = number
        count.completed = number - in_hook


def keep_order_of_loaders(trainer: Trainer) -> None:
    """Make the samplers that Lightning gives training loaders, to divide samples over ranks, shuffle only shuffled loaders.

    Lightning itself would shuffle the samples of every training loader."""
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader
    connector._prepare_dataloader = lambda loader, shuffle, mode: prepare(  # type: ignore[assignment,method-assign]
        loader, shuffle=_is_dataloader_shuffled(loader), mode=mode
    )


def ddp_option(strategy: DDPStrategy, name: str) -> Any:
    """Value of the option `name` that a DDPStrategy passes on to DistributedDataParallel; None if the option was not set."""
    return strategy._ddp_kwargs.get(name)


def saves_shards(strategy: FSDPStrategy) -> bool:
    """Whether an FSDPStrategy was given `state_dict_type="sharded"`."""
    return strategy._state_dict_type == "sharded"


def checkpoints_activations(strategy: FSDPStrategy) -> bool:
    """Whether an FSDPStrategy was given an activation checkpointing policy."""
    return bool(strategy._activation_checkpointing_kwargs)


def before_connecting(strategy: Strategy, do: Callable[[], object]) -> None:
    """Make each process of the run call `do` just before Lightning connects the processes.

    The result of `do` is kept alive until the processes are connected.
    """

    def do_and_connect(connect: Callable[[], None]) -> None:
        kept = do()
        connect()
        del kept

    wrap(strategy, "setup_environment", do_and_connect)


def watch_launched(ended: Callable[[int, int], None]) -> None:
    """Replace Lightning's watcher of launched processes: when a process that Lightning launched ends, a thread calls `ended`.

    Lightning's watcher would kill the present process if a launched process fails.

    Args:
        ended: takes the rank on this machine and the exit code, which is negative for a signal.
    """

    def watch(child_processes: list[Popen[Any]]) -> None:
        for rank, process in enumerate(child_processes, 1):
            threading.Thread(
                target=lambda r=rank, p=process: ended(r, p.wait()), name=f"watch-rank-{rank}", daemon=True
            ).start()

    subprocess_script._launch_process_observer = watch


def set_process_group_backend(strategy: ModelParallelStrategy, backend: str) -> None:
    """Set the backend of torch.distributed, such as "gloo". Call this before the process group is initialised."""
    strategy._process_group_backend = backend


def connect_processes(strategy: ModelParallelStrategy) -> None:
    """Set up device, process group and ranks, as `ModelParallelStrategy.setup_environment` does, but make no mesh."""
    assert strategy.accelerator is not None
    strategy.accelerator.setup_device(strategy.root_device)
    strategy._setup_distributed()


def set_device_mesh(strategy: ModelParallelStrategy, mesh: DeviceMesh) -> None:
    """Set the mesh that `strategy.device_mesh` and, in `configure_model`, `LightningModule.device_mesh` return."""
    strategy._device_mesh = mesh
    assert strategy.lightning_module is not None
    strategy.lightning_module._device_mesh = mesh


def restores_checkpoint(error: BaseException) -> bool:
    """Whether lightning, torch or lit_llm raised `error` while Lightning restored a checkpoint (weights, optimizers, loops, …).

    False if the user's own code raised the error: then its traceback helps the user.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name) for frame in frames]
    restores = any(  # the connector also saves; the loop restores the loaders' state, later
        (module == _CheckpointConnector.__module__ and "restore" in name)
        or (module, name) == (_FitLoop.__module__, _FitLoop._load_combined_loader_states.__name__)
        for module, name in places
    )
    return restores and places[-1][0].split(".")[0] in ("lightning", "torch", "lit_llm")
