"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._lightning import _AfterSteps, refuse_other_shards, reshard
from ._torch import AVERAGE, lerp_, local_box, local_part
from .errors import UserError, without
from .ranges import STEPS, below, check_ranges, whole


class EMA(_AfterSteps):
    """Keeps an exponential moving average of the trainable parameters, in fp32.

    After every `every_n_steps`-th optimizer step, with weights θ and n updates so far:

        average ← d · average + (1 − d) · θ;   d = min(decay, (1 + n) / (10 + n))

    (1 + n) / (10 + n) is the warm-up of TensorFlow's ExponentialMovingAverage. Without it, an average that begins with random
    weights keeps the share decayⁿ of them. A skipped step counts as one whose weights did not change.

    This callback does not change training, not by a bit. The average is sharded like the parameters: each rank updates its own
    part, without communication and without host synchronisation.

    Validation measures the average, unless `validate` is false: in `fit`, and by `trainer.validate` after a `fit`. With
    `ckpt_path`, `trainer.validate` measures the weights of the checkpoint. To exchange weights and average, one parameter at a
    time is copied; the weights of bf16 parameters are all kept in copies until they are exchanged back. Buffers and frozen
    parameters have no average. If a parameter is unfrozen during training, its average begins with its weights after the next
    step.

    Logs: nothing.

    Contract:
        on_train_start: restores the checkpoint's average, or begins the average with the weights.
        on_train_batch_end: updates the average after optimizer steps.
        on_validation_start: exchanges weights and average; on_validation_end, on_validation_interrupted, on_exception,
            on_save_checkpoint: exchange them back. In a module's `on_validation_epoch_end`, the model still has the average.
        on_save_checkpoint: adds the average to the checkpoint, under the key `AVERAGE`.
        State: the number of updates, and the average.
    Cost: 4 bytes a trainable parameter; one pass over weights and average an update.

    Args:
        decay: the share of the average that an update keeps.
        every_n_steps: optimizer steps between two updates.
        start_step: the average begins with the weights after this optimizer step.
        warmup: whether d rises as above; false: d = decay from the first update on.
        validate: whether validation measures the average instead of the weights.

    Raises:
        UserError: numbers out of range; the checkpoint's average is of another model; a strategy that shards without DTensor.
    """

    def __init__(
        self,
        decay: Annotated[float, below(0, 1)] = 0.999,
        every_n_steps: Annotated[int, whole(1, STEPS)] = 1,
        start_step: Annotated[int, whole(0, STEPS)] = 0,
        warmup: bool = True,
        validate: bool = True,
    ) -> None:
        check_ranges(EMA, locals())
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.warmup = warmup
        self.validate = validate
        self._average: dict[str, Tensor] = {}  # by the first name of a parameter; empty before start_step
        self._names: dict[nn.Parameter, str] = {}  # of the parameters that are averaged
        self._updates = 0
        self._saved: Any = None  # the average in the checkpoint that is resumed, until training starts
        self._owner: LightningModule | None = None  # whose average it is
        self._exchanged = False
        self._kept: dict[str, Tensor] = {}  # while exchanged: the weights that are narrower than their average

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_other_shards(trainer, EMA)
            self._average, self._names, self._kept, self._exchanged = {}, {}, {}, False
            self._saved, self._owner = None, pl_module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        step = trainer.global_step
        if self._saved is not None:
            self._restore(pl_module)
        elif step >= self.start_step:
            self._begin(pl_module)
            if step > self.start_step:
                rank_zero_info(f"EMA: the checkpoint has no average. It begins with the weights of step {step}.")

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if self._average:
            if any(p.requires_grad and p not in self._names for p in pl_module.parameters()):
                self._begin_others(pl_module)
            if step % self.every_n_steps == 0:
                self._update()
        elif step >= self.start_step:
            self._begin(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            if trainer.ckpt_path is not None or pl_module is not self._owner:
                return
            if self._saved is not None:
                self._restore(pl_module)
            state = pl_module.state_dict(keep_vars=True)  # moving a module between devices may replace its parameters
            self._names = {state[name]: name for name in self._average}
        self._exchange(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange_back(pl_module)

    def on_validation_interrupted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange weights and average back. `StopOnSignal` calls this after it interrupts a validation; Lightning does not."""
        self._exchange_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._exchange_back(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._exchange_back(pl_module)  # the checkpoint's weights are views of the model's
        if self._average:
            checkpoint[AVERAGE] = self.by_name(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(AVERAGE) if trainer.state.fn == TrainerFn.FITTING else None

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = int(state_dict["updates"])

    def by_name(self, pl_module: LightningModule) -> dict[str, Tensor]:
        """Name in `state_dict` → average of this trainable parameter, sharded like the parameter. Empty before `start_step`."""
        return {name: self._average[self._names[p]] for name, p in _trainable(pl_module).items() if p in self._names}

    @contextmanager
    def averaged(self, pl_module: LightningModule) -> Iterator[None]:
        """Context manager in which the model has the average as its weights, if an average exists and `validate` is true."""
        self._exchange(pl_module)
        try:
            yield
        finally:
            self._exchange_back(pl_module)

    @torch.no_grad()
    def _begin(self, pl_module: LightningModule) -> None:
        """Begin the average as a copy of the weights, and set the number of updates to 0."""
        self._updates = 0
        self._begin_others(pl_module)

    @torch.no_grad()
    def _begin_others(self, pl_module: LightningModule) -> None:
        """For each trainable parameter without an average, add an average that is a copy of the parameter."""
        for name, parameter in _trainable(pl_module).items():
            if parameter not in self._names:
                local_part(self._add(name, parameter)).copy_(local_part(parameter))

    def _add(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Allocate the average of a parameter, sharded like the parameter, and return it with uninitialised values."""
        self._names[parameter] = name
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._average[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return self._average[name]

    @torch.no_grad()
    def _restore(self, pl_module: LightningModule) -> None:
        """Copy the average from the checkpoint, which has whole tensors, in memory or on disk. Each rank copies its shards."""
        saved, self._saved = self._saved, None
        for name, parameter in _trainable(pl_module).items():
            if name not in saved or tuple(saved[name].shape) != tuple(parameter.shape):
                raise UserError(f"the average in the checkpoint is of another model: {name} does not fit; {without(EMA)}.")
            if parameter not in self._names:
                average = self._add(name, parameter)
                local_part(average).copy_(saved[name][local_box(average) if isinstance(average, DTensor) else ...])

    @torch.no_grad()
    def _update(self) -> None:
        keep = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        self._updates += 1
        wide: tuple[list[Tensor], list[Tensor]] = [], []
        for parameter, name in self._names.items():
            part, mean = local_part(parameter), local_part(self._average[name])
            if part.dtype == mean.dtype:
                wide[0].append(mean)
                wide[1].append(part)
            else:
                mean.lerp_(part.to(mean.dtype), 1 - keep)
        if wide[0]:
            lerp_(*wide, 1 - keep)

    def _exchange(self, pl_module: LightningModule) -> None:
        if self.validate and self._average and not self._exchanged:
            self._swap(pl_module)

    def _exchange_back(self, pl_module: LightningModule) -> None:
        if self._exchanged:
            self._swap(pl_module)

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule) -> None:
        """Exchange weights and average. A second call exchanges them back."""
        self._exchanged = not self._exchanged
        for parameter, name in self._names.items():
            part, mean = local_part(parameter), local_part(self._average[name])
            before = part.clone()
            part.copy_(self._kept.pop(name, mean))
            if part.dtype == mean.dtype:
                mean.copy_(before)
            elif self._exchanged:
                self._kept[name] = before
        reshard(pl_module)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their names in `state_dict`. A tied parameter is listed under each of its names."""
    state = module.state_dict(keep_vars=True).items()
    return {name: p for name, p in state if isinstance(p, nn.Parameter) and p.requires_grad}
