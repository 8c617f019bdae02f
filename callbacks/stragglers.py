"""Finds the slowest rank."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ._lightning import _PutsBack, accumulates, is_logged, write_row
from ._torch import after_gradients, gathered, tensors_in
from .contracts import SplitsLayers, offered
from .time_breakdown import clock_of


class Stragglers(_PutsBack):
    """Logs which rank works longest in a step, and for how long.

    Fast ranks wait for the slowest rank, so a step takes equally long on all. A rank's work is the step without its waits.

    Logs for each logged step but a process's first two, if there are several ranks:
        `rank/step_time_max`: seconds that the slowest rank computes in the step.
        `rank/step_time_mean`: seconds that a rank computes in the step, averaged over ranks.
        `rank/straggler`: number of the slowest rank. A faulty rank shows up repeatedly; otherwise the number varies by chance.

    A step is measured from the end of one gradient synchronisation to the end of the next, unless validation or a save is in
    it. Measured waits:
        DDP: from the end of this rank's gradient computation to the end of the reduction over all ranks.
        FSDP2: as with DDP, and the all-gather of each sharded module's parameters, forward and backward. On a CPU, waits in a
            reduce-scatter between two layers count as work. On CUDA no rank waits in a reduce-scatter.
    Waits in other collectives count as work on every rank, and so hide the delay of the slow rank:
        Lightning's SIGTERM broadcast before every micro-batch hides delays in all micro-batches of a step but the last.
        StopOnSignal removes that broadcast. StopOnSignal's all-reduce once a step hides delays in the optimizer.
        Tensor and context parallelism: collectives within each layer give all ranks of a group the same time.
        FSDP1: waits in its collectives are not measured.
    With pipeline stages (a strategy whose `pipeline_mesh` is not None) this callback is off, and says so once.

    On CUDA, times are measured by events on the current stream.

    Contract:
        on_train_start: with several ranks and FSDP2, registers hooks before and after FSDP2's.
        on_before_backward, on_after_backward: record begin, end and waits of a step that will be logged.
        on_before_optimizer_step: all-gathers one number per rank and writes the row.
        on_validation_start, on_save_checkpoint: discard the measurement of the current step.
        teardown, on_exception: remove the hooks.
        State: none.
    Cost: not measurable on two gloo processes (benchmarks/callback_cost.py). On CUDA the host synchronises at logged steps.
    """

    def _forget(self) -> None:
        self._step_began: Any = None  # a time of the clock; None = this step is not measured
        self._step_ended: Any = None
        self._wait_began: Any = None
        self._waits: list[tuple[Any, Any]] = []  # begin and end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()
        self._several = trainer.world_size > 1
        if offered(trainer.strategy, SplitsLayers):
            rank_zero_info("rank/straggler: not logged, because pipeline stages wait for each other in the middle of a step.")
            self._several = False
        self._first = trainer.global_step + 3  # in the second step DDP rebuilds its buckets, an unmeasured wait
        self._clock = clock_of(trainer.strategy.root_device)
        self._forget()
        if self._several:
            for module in pl_module.modules():
                if isinstance(module, FSDPModule):
                    self._surround(module)

    def _surround(self, module: nn.Module) -> None:
        """Register hooks around FSDP2's hooks that all-gather the module's parameters, to time forward and backward waits."""
        outputs: list[Tensor] = []  # of the forward pass under way

        def before_fsdp_hooks_the_output(module: nn.Module, args: Any, output: Any) -> None:
            if self._step_began is not None and torch.is_grad_enabled():
                outputs.extend(tensor for tensor in tensors_in(output) if tensor.requires_grad)
                for leaf in outputs:
                    leaf.register_hook(self._begin_wait)

        def after_fsdp_hooked_the_output(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in outputs:
                leaf.register_hook(self._end_wait)
            outputs.clear()

        eager = torch.compiler.disable  # compiled blocks also call hooks
        # FSDP2 puts its forward pre-hook first and its forward hook last.
        self._undo += (
            module.register_forward_pre_hook(eager(self._begin_wait), prepend=True).remove,
            module.register_forward_pre_hook(eager(self._end_wait)).remove,
            module.register_forward_hook(eager(before_fsdp_hooks_the_output), prepend=True).remove,
            module.register_forward_hook(eager(after_fsdp_hooked_the_output)).remove,
        )

    def _begin_wait(self, *_: Any) -> None:
        if self._step_began is not None:
            self._wait_began = self._clock.now()

    def _end_wait(self, *_: Any) -> None:
        if self._wait_began is not None:
            self._waits.append((self._wait_began, self._clock.now()))
            self._wait_began = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step_began is None:
            return

        def backward_began(grad: Tensor) -> None:
            after_gradients(self._begin_wait)  # from here on, the strategy only waits for the reduction

        loss.register_hook(backward_began)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_wait()
        if not self._several or accumulates(trainer):
            return
        if self._step_began is not None:
            self._step_ended = self._clock.now()  # read in on_before_optimizer_step, which follows
        elif self._is_measured(trainer, trainer.global_step + 2):
            self._step_began = self._clock.now()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if self._step_ended is None:
            return
        self._clock.synchronize()
        waited = sum(self._clock.seconds(begin, end) for begin, end in self._waits)
        own = self._clock.seconds(self._step_began, self._step_ended) - waited
        times = gathered(own)
        step, ended = trainer.global_step + 1, self._step_ended
        self._forget()
        if self._is_measured(trainer, step + 1):
            self._step_began = ended
        row = {
            "rank/step_time_max": max(times),
            "rank/step_time_mean": sum(times) / len(times),
            "rank/straggler": float(times.index(max(times))),
        }
        write_row(trainer, row, step)

    def _is_measured(self, trainer: Trainer, step: int) -> bool:
        return is_logged(trainer, step) and step >= self._first  # so never step 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()
