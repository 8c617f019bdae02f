"""The gradient norm, computed once for clipping and for logging."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ._lightning import is_logged, refuse_other_shards, write_row
from ._torch import local_part, multiply_, unscales_by_itself
from .contracts import ScalesLoss, SplitsLayers, offered
from .errors import UserError, setting
from .ranges import Domain, check_ranges


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """Global L2 norm of gradients, in fp32 (float64 for float64 gradients): a plain 0-d tensor on the first gradient's device.

    All shards of a sharded gradient (DTensor) count. Gradients are grouped by mesh and placement first, because norms of
    differently distributed tensors, or of DTensors and plain tensors, cannot be stacked.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(grad)
    norms: list[Tensor] = []
    for group in groups.values():
        if any(grad.dtype in (torch.bfloat16, torch.float16) for grad in group):
            # get_total_norm would sum the norms in bf16 or fp16.
            each = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in group]
            norm = torch.linalg.vector_norm(torch.stack([n.to(each[0].device) for n in each]))
        else:
            norm = get_total_norm(group)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def gradient_norm(trainer: Trainer, optimizer: torch.optim.Optimizer) -> Tensor:
    """L2 norm (0-d) of an optimizer's gradients over all ranks that hold parts of the model. A collective of these ranks.

    With pipeline stages (`SplitsLayers`), ranks hold different parameters: the squares of the ranks' norms are added. A
    parameter of which an earlier rank has a copy counts on that rank only.
    """
    pipeline = offered(trainer.strategy, SplitsLayers)
    repeated = () if pipeline is None else pipeline.repeated_parameters
    norm = total_norm(
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p not in repeated
    )
    if pipeline is None:
        return norm
    square = norm.to(optimizer_device(optimizer), torch.float64).square()
    dist.all_reduce(square, group=pipeline.pipeline_mesh.get_group())
    return square.sqrt().to(norm.dtype)


def optimizer_device(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of an optimizer's first parameter. Some parameter groups may be empty, but one must have a parameter."""
    first: Tensor = next(p for group in optimizer.param_groups for p in group["params"])
    return first.device


def scale_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-d tensor. A DTensor's local shard is multiplied, without communication."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        local = local_part(grad)
        by_device[local.device].append(local)
    for device, group in by_device.items():
        multiply_(group, factor.to(device))


def refuse_late_unscaling(trainer: Trainer, use: str) -> None:
    """Refuse an optimizer that unscales gradients in its own step, too late for a callback that reads them before.

    Args:
        use: what the callback does with the gradients, for the error's sentence: "they would be clipped".

    Raises:
        UserError: fp16 loss scaling is on, and an optimizer unscales gradients itself.
    """
    for optimizer in trainer.optimizers if offered(trainer.precision_plugin, ScalesLoss) else ():
        if unscales_by_itself(optimizer):
            raise UserError(
                f"{type(optimizer).__name__}(fused=True) unscales 16-mixed gradients itself, after {use}: use"
                f" bf16-mixed ({setting(Trainer, 'precision')}), or an optimizer with fused=False."
            )


class GradientNorm(Callback):
    """Clips the global gradient norm and logs it; the norm is computed once for both.

    All gradients g become g·min(1, clip/(‖g‖ + 1e-6)), in the same direction. Leave `Trainer(gradient_clip_val)` unset.

    Logs: `grad/norm` (before clipping); if clipping, also `grad/norm_clipped` (after) and `grad/clip_fraction`: of the
    optimizer steps since the last row, the fraction whose norm was above `clip`.

    `latest_norm` is the norm of the current step before clipping, for callbacks that come after this one. None = not
    computed.

    Contract:
        on_train_start: refuses settings with which the norm would be wrong.
        on_train_batch_start: clears `latest_norm`.
        on_before_optimizer_step: computes the norm, clips, and writes the row at logged steps. Between two rows the host
            does not synchronise; with `clip=None` the norm is not computed either.
        State: the counts behind `grad/clip_fraction`.

    Args:
        clip: largest norm after clipping; infinity = no clipping; None = log only.

    Raises:
        UserError: clip <= 0; `Trainer(gradient_clip_val)` is set; fp16 loss scaling with an optimizer that unscales by
            itself (fused), whose gradients are still scaled when they would be clipped; a strategy that shards without DTensor.
    """

    def __init__(self, clip: Annotated[float | None, Domain(0, 10**9, above_low=True, also=(math.inf,))] = 1.0) -> None:
        check_ranges(GradientNorm, locals())
        self.clip = clip
        self.latest_norm: Tensor | None = None  # 0-d, on the device
        self._steps = 0  # optimizer steps since the last row
        self._clipped: Tensor | int = 0  # how many of them were clipped; a device tensor once training runs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.gradient_clip_val:
            raise UserError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and GradientNorm(clip={self.clip}) would both"
                f" clip: remove {setting(Trainer, 'gradient_clip_val')}."
            )
        refuse_other_shards(trainer, GradientNorm)
        refuse_late_unscaling(trainer, "they would be clipped")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.latest_norm = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step = trainer.global_step + 1
        logged = is_logged(trainer, step)
        self._steps += 1
        if self.clip is None and not logged:
            return
        norm = self.latest_norm = gradient_norm(trainer, optimizer)
        if self.clip is not None:
            grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
            if factor.device.type != "cpu" or factor != 1:  # reading is free on a CPU; multiplying by 1 changes no bit
                scale_(grads, factor)
            self._clipped = self._clipped + (norm > self.clip)
        if not logged:
            return
        if self.clip is None:
            row = {"grad/norm": norm.item()}
        else:
            assert isinstance(self._clipped, Tensor)
            value, clipped = torch.stack([norm.double(), self._clipped.double()]).tolist()  # one host sync for both
            row = {
                "grad/norm": value,
                "grad/norm_clipped": value * min(1.0, self.clip / (value + 1e-6)),
                "grad/clip_fraction": clipped / self._steps,
            }
        self._steps, self._clipped = 0, 0
        write_row(trainer, row, step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "clipped": int(self._clipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps, self._clipped = int(state_dict["steps"]), int(state_dict["clipped"])
