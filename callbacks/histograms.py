"""Histograms of weights and gradients."""

from __future__ import annotations

import re
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ._lightning import refuse_other_shards, write_row
from ._torch import gathered, local_gradient, local_part, process_count
from .contracts import SplitsLayers, offered
from .errors import UserError, refused, setting, without
from .gradient_norm_and_clipping import refuse_late_unscaling
from .health_layers import copies, trained_parameters
from .metrics_file import MetricsFile
from .ranges import STEPS, check_ranges, whole

BINS = 64
_CHUNK = 2**22  # values at a time: about 100 MB of temporary tensors


class Histograms(Callback):
    """Logs a histogram of each trained parameter and of its gradient, at step 1 and every `every_n_steps` steps.

    A histogram has 64 bins of one width between the smallest and the largest finite value, as `numpy.histogram(x, 64)`. So
    edges differ from step to step, and one outlier widens all bins.

    Logs histograms to TensorBoard and W&B only, and nothing if a run has neither:
        `weights/NAME`: histogram of a parameter before the update; NAME is the parameter's name in `named_parameters`.
        `gradients/NAME`: histogram of the parameter's gradient before clipping. List this callback before `GradientNorm`.
        `nonfinite/weights/NAME`, `nonfinite/gradients/NAME`: number of values that are NaN or infinite, to every logger, if
            there are any; the histograms leave these values out.

    Contract:
        on_fit_start: chooses parameters, and warns if no logger takes histograms; nothing is computed then.
        on_before_optimizer_step: at a sampled step, counts on the device and writes. Ranks count their shards; the counts are
            reduced over the ranks. The host synchronises at sampled steps only.
        State: none. This callback does not change training.
    Cost: a sampled step reads weights and gradients twice. TensorBoard stores 1.2 kB for each histogram.

    Args:
        every_n_steps: optimizer steps between two histograms.
        parameters: regular expression; parameters whose names match (`re.search`) are logged. null = all trained parameters.

    Raises:
        UserError: every_n_steps < 1; an invalid regular expression, or one that matches no name; several optimizers; a strategy
            that shards without DTensor; fp16 loss scaling with an optimizer that unscales by itself (fused).
    """

    def __init__(self, every_n_steps: Annotated[int, whole(1, STEPS)] = 500, parameters: str | None = None) -> None:
        check_ranges(Histograms, locals())
        try:
            self._pattern = re.compile(parameters or "")
        except re.error as error:
            raise UserError(
                refused(Histograms, "parameters", f"is {parameters!r}, which is no regular expression: {error}")
            ) from None
        self.every_n_steps = every_n_steps
        self.parameters = parameters
        self._held: dict[str, Tensor] = {}  # parameters of this rank
        self._copies: dict[str, float] = {}  # of all ranks: how many hold the same part

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not later: FSDP2 may have gathered weights by then, and named_parameters would give those.
        self._held, self._copies = {}, {}
        if not any(isinstance(logger, TensorBoardLogger | WandbLogger) for logger in trainer.loggers):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers if not isinstance(logger, MetricsFile))
            rank_zero_warn(
                "Histograms writes nothing: TensorBoard and W&B take histograms, but the loggers are: "
                f"{names or 'none'}. Add one to {setting(Trainer, 'logger')}, or {without(Histograms)}."
            )
            return
        if len(trainer.optimizers) != 1:
            raise UserError(f"Histograms works with one optimizer, not {len(trainer.optimizers)}: {without(Histograms)}.")
        refuse_other_shards(trainer, Histograms)
        refuse_late_unscaling(trainer, "Histograms shows them")
        trained, ranks = trained_parameters(trainer, pl_module)
        self._held = {name: parameter for name, parameter in trained if self._pattern.search(name)}
        self._copies = {name: copies(parameter, ranks) for name, parameter in self._held.items()}
        if offered(trainer.strategy, SplitsLayers) is not None:
            self._copies = {name: number for stage in gathered(self._copies) for name, number in stage.items()}
        if not self._copies:
            raise UserError(
                refused(Histograms, "parameters", f"is {self.parameters!r}, which occurs in no name of a trained parameter")
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step = trainer.global_step + 1
        if not self._copies or (step > 1 and step % self.every_n_steps):
            return
        parts: dict[str, Tensor | None] = {}
        for name in self._copies:
            parameter = self._held.get(name)
            parts[f"weights/{name}"] = None if parameter is None else local_part(parameter)
            parts[f"gradients/{name}"] = None if parameter is None else local_gradient(parameter)
        edges, counts = count_values(list(parts.values()), trainer.strategy.root_device)
        histograms, row = {}, {}
        for tag, limits, (*numbers, nonfinite) in zip(parts, edges.cpu().numpy(), counts.tolist(), strict=True):
            number = self._copies[tag.partition("/")[2]]
            if nonfinite:
                row[f"nonfinite/{tag}"] = nonfinite / number
            if any(numbers):
                histograms[tag] = np.array(numbers) / number, limits
        if row:
            write_row(trainer, row, step)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            log_histograms(logger, histograms, step)


@torch.no_grad()
def count_values(parts: list[Tensor | None], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return bin edges (n, 65) and counts (n, 65) of n tensors: 64 bins, and last the number of values that are not finite.

    Each rank passes its shards of the tensors, or None. Counts are sums over the ranks. All bins but the last are half open.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    chunks = [() if part is None or not part.numel() else part.reshape(-1).split(_CHUNK) for part in parts]
    ends = torch.full((len(parts), 2), -torch.inf, dtype=dtype, device=device)  # -smallest, largest
    for row, each in zip(ends, chunks, strict=True):
        for x in each:
            signed = torch.stack([(sign * x).masked_fill(~x.isfinite(), -torch.inf).amax() for sign in (-1, 1)])
            torch.maximum(row, signed.to(row), out=row)
    if process_count() > 1:
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    ends.masked_fill_(ends == -torch.inf, 0.0)  # of a tensor without a finite value
    low, high = -ends[:, :1], ends[:, 1:]
    low, high = torch.where(low == high, low - 0.5, low), torch.where(low == high, high + 0.5, high)
    edges = low + (high - low) / BINS * torch.arange(BINS, dtype=dtype, device=device)
    edges = torch.cat([edges, high], 1)
    counts = torch.zeros((len(parts), BINS + 1), dtype=torch.int64, device=device)
    for limits, row, each in zip(edges, counts, chunks, strict=True):
        for x in each:
            bins = torch.bucketize(x.to(dtype), limits[1:-1].to(x.device), right=True, out_int32=True)
            row += bins.masked_fill_(~x.isfinite(), BINS).bincount(minlength=BINS + 1).to(device)
    if process_count() > 1:
        dist.all_reduce(counts)
    return edges, counts


def log_histograms(logger: Logger, histograms: dict[str, tuple[np.ndarray, np.ndarray]], step: int) -> None:
    """Write histograms, tag → (counts, edges), to a TensorBoard or W&B logger; other loggers get none. Call on rank 0."""
    if isinstance(logger, TensorBoardLogger):
        for tag, (counts, edges) in histograms.items():
            centres = (edges[:-1] + edges[1:]) / 2
            logger.experiment.add_histogram_raw(
                tag, edges[0], edges[-1], counts.sum(), counts @ centres, counts @ centres**2, edges[1:], counts, step
            )  # its page does not show the sums, which are those of the centres
    elif isinstance(logger, WandbLogger):
        from wandb import Histogram

        logger.log_metrics({tag: Histogram(np_histogram=each) for tag, each in histograms.items()}, step)
