"""Which rank the others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ._lightning import accumulates, is_logged, write_row
from ._torch import after_gradients, tensors_in


class Stragglers(Callback):
    """Names the rank that is slowest at its own work, and says how long that takes it and the average rank.

    In synchronous training every step takes every rank equally long: the fast ones wait for the slow one. So what is measured
    is the time of a rank's step less the time in which it was seen to wait, which is least where the others wait for it.

    Logs at logged steps (not at the first two steps of a process, nor on one process), about that step alone:
        `rank/step_time_max`: seconds of own work of the slowest rank.
        `rank/step_time_mean`: the same, averaged over ranks. Equal to the maximum, nobody waits.
        `rank/straggler`: the slowest rank. A rank that is slow shows again and again; by chance it is another each time.

    A step is measured from the end of one gradient synchronisation to the end of the next: the optimizer, callbacks, loading
    of data, forward, backward. Not measured: steps between which a checkpoint was saved or validation ran. Seen waits are
        DDP: from when this rank's own gradients are all computed until those of all ranks are reduced.
        FSDP2: that, and for each sharded module until its parameters are gathered, forward and backward. What a rank waits
            in a reduce-scatter between two layers is not seen (on a CPU; on CUDA nobody waits there), and is taken for work.
    Not seen are waits in other collectives: what slows a rank down before one of them counts for all ranks. Lightning's
    SIGTERM broadcast, before every micro-batch, is one, and hides all but the last micro-batch of a step; StopOnSignal, which
    does away with it, asks once a step, and hides the optimizer. So do the collectives within each layer of tensor parallelism,
    whose ranks count alike, and those of FSDP1.

    On CUDA the device's times are measured, with events on the current stream.

    Contract:
        on_train_start: with several ranks and FSDP2, hooks around those of sharded modules.
        on_before_backward, on_after_backward: note the waits of a step that will be logged, and where it begins and ends.
        on_before_optimizer_step: one all-gather of a number per rank, and the row.
        on_validation_start, on_save_checkpoint: the step under way is not measured.
        teardown, on_exception: removes the hooks.
        State: none.
    Cost: none that shows. The ratio of time per step with and without, in runs on two gloo processes that took turns step by
    step with a row every 5 (benchmarks/callback_cost.py, a busy machine, 4 runs): 0.99 (0.96 to 1.04) on the wall, 1.01 (0.91
    to 1.13) on the CPU. On CUDA the host waits for the device at logged steps; not measured there.
    """

    def __init__(self) -> None:
        self._several = False  # ranks
        self._first = 0  # optimizer step
        self._device = torch.device("cpu")
        self._step_began: Any = None  # a time of `_now`; None: this step is not measured
        self._step_ended: Any = None
        self._waits: list[tuple[Any, Any]] = []  # begin and end
        self._wait_began: Any = None
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self._several = trainer.world_size > 1
        self._first = trainer.global_step + 3  # in the second, ranks under DDP agree on new buckets and wait where none looks
        self._device = trainer.strategy.root_device
        self._forget()
        if self._several:
            for module in pl_module.modules():
                if isinstance(module, FSDPModule):
                    self._surround(module)

    def _surround(self, module: nn.Module) -> None:
        """Hooks before and after those with which FSDP2 gathers the module's parameters, forward and backward."""
        outputs: list[Tensor] = []  # of the forward pass under way

        def before_gathering(*_: Any) -> None:
            self._begin_wait()

        def after_gathering(*_: Any) -> None:
            self._end_wait()

        def before_fsdp_hooks_the_output(module: nn.Module, args: Any, output: Any) -> None:
            if self._step_began is not None and torch.is_grad_enabled():
                outputs.extend(tensor for tensor in tensors_in(output) if tensor.requires_grad)
                for leaf in outputs:
                    leaf.register_hook(before_gathering)

        def after_fsdp_hooked_the_output(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in outputs:
                leaf.register_hook(after_gathering)
            outputs.clear()

        def eager(hook: Callable[..., None]) -> Callable[..., None]:
            return torch.compiler.disable(hook)  # a compiled block calls its hooks too

        # FSDP2 puts its forward pre-hook first and its forward hook last.
        self._hooks += [
            module.register_forward_pre_hook(eager(before_gathering), prepend=True),
            module.register_forward_pre_hook(eager(after_gathering)),
            module.register_forward_hook(eager(before_fsdp_hooks_the_output), prepend=True),
            module.register_forward_hook(eager(after_fsdp_hooked_the_output)),
        ]

    def _now(self) -> Any:
        """The time: on a CPU in seconds, on CUDA as an event of the current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return end - begin if self._device.type != "cuda" else begin.elapsed_time(end) / 1e3

    def _begin_wait(self) -> None:
        if self._step_began is not None:
            self._wait_began = self._now()

    def _end_wait(self) -> None:
        if self._wait_began is not None:
            self._waits.append((self._wait_began, self._now()))
            self._wait_began = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step_began is None:
            return

        def backward_began(grad: Tensor) -> None:
            after_gradients(self._begin_wait)  # the strategy then waits for the reduction

        loss.register_hook(backward_began)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_wait()
        if not self._several or accumulates(trainer):
            return
        if self._step_began is not None:
            self._step_ended = self._now()  # read when the row is written, which is next
        elif self._is_measured(trainer, trainer.global_step + 2):
            self._step_began = self._now()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if self._step_ended is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        waited = sum(self._seconds(begin, end) for begin, end in self._waits)
        own = self._seconds(self._step_began, self._step_ended) - waited
        mine = torch.tensor([own], dtype=torch.float32, device=self._device)  # not float64, which MPS has not
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        times = torch.cat(gathered).tolist()  # (ranks,)
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

    def _forget(self) -> None:
        self._step_began = self._step_ended = self._wait_began = None
        self._waits = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
