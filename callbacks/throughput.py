"""Tokens per second, model FLOP utilisation (MFU), share of time waiting for data, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from ._lightning import (
    FETCH,
    SAMPLES,
    SAVE,
    TASKS,
    VALIDATION,
    _PutsBack,
    data_parallel,
    is_logged,
    listen,
    shards_otherwise,
    write_row,
)
from ._torch import tensors_in
from .device_peaks import peak_of, peaks_of
from .errors import UserError, setting
from .ranges import above, check_ranges

# Profiler actions that are not part of a training step. Other callbacks may announce long work as SAMPLES.
_OUTSIDE = (SAVE, SAMPLES, TASKS, VALIDATION)


def count_tokens(batch: Any) -> int:
    """Number of tokens in a batch: elements of `batch["input_ids"]`, or else of the batch's first integer tensor (depth first).

    Raises:
        UserError: the batch has no integer tensor.
    """
    if isinstance(batch, dict) and isinstance(batch.get("input_ids"), torch.Tensor):
        return batch["input_ids"].numel()
    for tensor in tensors_in(batch):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
            return tensor.numel()
    raise UserError(
        f"Throughput counts tokens but a batch of type {type(batch).__name__} has no integer tensor:"
        ' yield {"input_ids": …} from the train_dataloader, or remove the callback.'
    )


class Throughput(_PutsBack):
    """Logs the speed of training between two logged steps, the peak memory, and the tokens read so far.

    The measured time runs from one row to the next, when the gradients of a logged step are ready and CUDA is synchronised:
    whole optimizer steps with data, logging and every callback. Excluded: validation, saving, text samples and tasks, and the
    first step of a process (compilation, warm-up), so the first row has no speed.

    Logs at logged steps:
        `throughput/tokens_per_second`: tokens per second of all ranks together.
        `throughput/mfu`: tokens/s · FLOPs per token / (devices · dense peak); absent if the peak is unknown. FLOPs per
            token is `LightningModule.flops_per_token` if it exists, else 6 · parameters. FLOPs and peak are printed once.
        `time/data_fraction`: share of the measured time spent in the train loader's next().
        `memory/peak_gb`: peak memory since the process began, in GB (1e9 bytes): allocated CUDA memory, else resident memory.
        `progress/tokens`: tokens that all ranks have read since the beginning of training, across resumes.

    Contract:
        on_train_start: wraps `trainer.profiler`, to which the Trainer reports fetching and saving.
        on_train_batch_start: counts the batch's tokens from its shape, without a device synchronisation.
        on_before_optimizer_step: writes the row, so that on_train_batch_end hooks can read it.
        teardown, on_exception: unwrap the profiler.
        State: tokens consumed.
    Assumes batches of equal size on all ranks.

    Args:
        peak_tflops: dense peak of one device in TFLOP/s, for hardware that is not in the table; null = use the table.

    Raises:
        UserError: peak_tflops <= 0; a batch without an integer tensor.
    """

    def __init__(self, peak_tflops: Annotated[float | None, above(0, 10**9)] = None) -> None:
        check_ranges(Throughput, locals())
        self.peak_tflops = peak_tflops
        self._tokens = 0  # consumed by all ranks
        self._world = 1  # data-parallel ranks
        self._cuda = False
        self._flops_per_token: float | None = None
        self._peak: float | None = None  # FLOP/s of all devices
        # The window since the last row:
        self._begin: float | None = None  # None before the end of the first step
        self._begin_tokens = 0
        self._outside_seconds = 0.0
        self._data_seconds = 0.0
        # Nesting depth of excluded sections: a save may happen during validation.
        self._outside_depth = 0
        self._outside_since = 0.0
        self._fetch_since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._world = data_parallel(trainer)[1]
        self._cuda = trainer.strategy.root_device.type == "cuda"
        self._begin, self._outside_depth = None, 0
        self._find_peak(trainer, pl_module)
        self._put_back()
        clock = time.perf_counter

        def started(action: str) -> None:
            if action == FETCH:
                self._fetch_since = clock()
            elif action in _OUTSIDE:
                self._enter_outside()

        def stopped(action: str) -> None:
            if action == FETCH:
                self._data_seconds += clock() - self._fetch_since
            elif action in _OUTSIDE:
                self._leave_outside()

        self._undo = (listen(trainer, started, stopped),)

    def _find_peak(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = None
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        tflops = self.peak_tflops
        if tflops is None and device.type == "cuda":
            tflops = peak_of(peaks_of(name), str(trainer.precision), torch.get_float32_matmul_precision())
        if tflops is None:
            if device.type != "cpu":  # nobody expects it there
                rank_zero_info(
                    f"throughput/mfu: not logged, because the dense peak of {name} at precision {trainer.precision} is unknown"
                    f" (set {setting(Throughput, 'peak_tflops')})."
                )
            return
        own = getattr(pl_module, "flops_per_token", None)  # `SaysFlops`, read once: it may be traced
        if own is None and shards_otherwise(trainer):
            rank_zero_info(
                f"throughput/mfu: not logged, because {type(trainer.strategy).__name__} hides the number of parameters (give"
                f" {type(pl_module).__name__} an attribute flops_per_token)."
            )
            return
        parameters = sum(p.numel() for p in pl_module.parameters())
        self._flops_per_token = 6.0 * parameters if own is None else float(own)
        self._peak = tflops * 1e12 * trainer.world_size
        convention = f"{type(pl_module).__name__}.flops_per_token" if own is not None else f"6 x {parameters:,} parameters"
        rank_zero_info(
            f"throughput/mfu: {self._flops_per_token:,.0f} FLOPs per token ({convention}) over {trainer.world_size} x"
            f" {tflops:g} TFLOP/s ({name}, {trainer.precision}, dense)."
        )

    def _enter_outside(self) -> None:
        if self._outside_depth == 0:
            self._synchronize()  # work queued so far belongs to the steps
            self._outside_since = time.perf_counter()
        self._outside_depth += 1

    def _leave_outside(self) -> None:
        self._outside_depth -= 1
        if self._outside_depth == 0:
            self._synchronize()
            self._outside_seconds += time.perf_counter() - self._outside_since

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _peak_memory(self) -> int:
        """Peak memory in bytes: CUDA memory that torch allocated, or without CUDA this process's resident memory."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._tokens += count_tokens(batch) * self._world

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step = trainer.global_step + 1
        logged = is_logged(trainer, step)
        first = self._begin is None
        if not logged and not first:
            return
        self._synchronize()
        now = time.perf_counter()
        row = {"progress/tokens": float(self._tokens), "memory/peak_gb": self._peak_memory() / 1e9}
        if self._begin is not None:
            seconds = max(now - self._begin - self._outside_seconds, 1e-9)
            speed = (self._tokens - self._begin_tokens) / seconds
            row["throughput/tokens_per_second"] = speed
            row["time/data_fraction"] = self._data_seconds / seconds
            if self._peak is not None and self._flops_per_token is not None:
                row["throughput/mfu"] = speed * self._flops_per_token / self._peak
        self._begin, self._begin_tokens = now, self._tokens
        self._data_seconds = self._outside_seconds = 0.0
        if logged:  # otherwise the first step of a process, which only starts the clock
            write_row(trainer, row, step)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self._tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens = int(state_dict["tokens"])
