"""Skips optimizer steps with a loss or gradient spike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ._lightning import _PutsBack, is_logged, refuse_other_shards, wrap, write_row
from ._torch import process_count
from .contracts import KnowsNorm, MeanOfMicroBatches, NumbersSamples, SaysStepLoss, ScalesLoss, offered, offered_by_data
from .errors import UserError, refused, setting, without
from .gradient_norm_and_clipping import gradient_norm, optimizer_device, refuse_late_unscaling
from .ranges import STEPS, above, check_ranges, whole

LEARNED = 1e-4
"""A loss below this share of the run's first loss shows that the model has memorised the text."""
_UNREAD_AT_MOST = 128
_NAMED_AT_MOST = 3


class SpikeGuard(_PutsBack):
    """Skips an optimizer step if its loss or gradient norm is not finite or exceeds mean + sigma · std of recent good steps.

    A step whose loss is below 1/10,000 of the run's first loss is no spike, whatever its norm: on memorised text, tiny losses
    and norms differ by large factors.

    A skipped step leaves parameters, moments and the optimizer's step counters unchanged, bit for bit, but not buffers that a
    forward pass writes. The trainer still counts the step, so schedule and data advance. The loss is the module's `step_loss`
    (`contracts.py`), otherwise the mean over the step's micro-batches. The norm is the gradient norm before clipping. Both are
    averaged over ranks, so all ranks skip the same steps. A step without targets is skipped only if its norm is not finite.

    The test runs on the device. Optimizers that honour `found_inf` skip the update there, without host synchronisation:
    torch's Adam, AdamW, SGD and Adagrad with `fused=True`, and classes with an attribute `honours_found_inf = True`. Any other
    optimizer is not called if the step is bad: the host reads the result once a step, and on a GPU waits for the backward pass.
    So is torch's fused SGD until its first good step, because a skipped first step would leave its momentum uninitialised.

    With fp16 loss scaling, a norm that is not finite while the loss is finite is an overflow: the scaler skips
    such a step, this callback does not report it, and its values do not enter the window.

    Logs, at logged steps: `spike/skipped`, the number of steps skipped since the last row. A warning names these steps, and
    their global sample numbers if the data module has `step_samples` (a range). After `max_consecutive` skipped steps in a row,
    checked at logged steps, training stops (`trainer.should_stop`) with the weights of the last good step, and the reason
    in `diagnosis` (otherwise None).

    Contract:
        on_train_start: wraps `optimizer.step`; teardown, on_exception: unwrap `optimizer.step`.
        on_before_backward: adds up the loss of the micro-batches.
        on_before_optimizer_step: tests the step; reads the results on the host at logged steps (or after 128 steps). Uses
            the norm of an earlier callback with `latest_norm` (GradientNorm), otherwise computes the norm.
        State: losses and norms of the window, the run's first loss, and numbers of skipped steps; plain types.
    Cost: under 0.1 ms a step on one CPU core, about 30 kernels of a few hundred elements; on several ranks one all-reduce
    of 8 bytes.

    Args:
        window: number of recent good steps to compare with.
        sigma: a value is a spike if it exceeds the mean by this many standard deviations.
        min_steps: good steps needed before a finite value can be a spike.
        max_consecutive: skipped steps in a row after which training stops.

    Raises:
        UserError: numbers out of range; several optimizers; fp16 loss
            scaling with a fused optimizer, which unscales the gradients only after this callback reads them; a strategy that
            shards without DTensor.
    """

    def __init__(
        self,
        window: Annotated[int, whole(2, 10**6)] = 128,
        sigma: Annotated[float, above(0, 10**6)] = 6.0,
        min_steps: Annotated[int, whole(2, 10**6)] = 32,
        max_consecutive: Annotated[int, whole(1, STEPS)] = 10,
    ) -> None:
        check_ranges(SpikeGuard, locals())
        if min_steps > window:
            raise UserError(refused(SpikeGuard, "min_steps", f"is {min_steps}, but must be at most window, which is {window}"))
        self.window = window
        self.sigma = sigma
        self.min_steps = min_steps
        self.max_consecutive = max_consecutive
        self.diagnosis: str | None = None
        # Rows: 1 = column in use, loss, norm. One column per good step, oldest first; unused columns are zero.
        self._good = torch.zeros(3, window)
        self._first = torch.tensor(math.nan)  # the first finite loss of the run
        self._losses = MeanOfMicroBatches()
        self._skip: Tensor | None = None  # 0-d: 1.0 = skip the current step, 0.0 = make it; None once it is applied
        self.latest_skip: Tensor | None = None  # the same, until the next step
        # Step, its samples, and (skip, is observed, (loss, norm), their limits) on the device.
        self._unread: list[tuple[int, range | None, tuple[Tensor, ...]]] = []
        self._skipped = 0  # since the last row
        self._consecutive = 0
        self._scaler: Any = None
        self._norm_source: KnowsNorm | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise UserError(
                f"SpikeGuard needs exactly one optimizer, but {type(pl_module).__name__} has {len(trainer.optimizers)}:"
                f" {without(SpikeGuard)}."
            )
        optimizer = trainer.optimizers[0]
        refuse_other_shards(trainer, SpikeGuard)
        scaling = offered(trainer.precision_plugin, ScalesLoss)
        self._scaler = None if scaling is None else scaling.scaler
        refuse_late_unscaling(trainer, "SpikeGuard reads them")
        self._good, self._first = (each.to(trainer.strategy.root_device) for each in (self._good, self._first))
        self._losses, self._skip, self._unread, self.diagnosis = MeanOfMicroBatches(), None, [], None
        self._norm_source = next((c for c in trainer.callbacks if hasattr(c, "latest_norm")), None)  # type: ignore[attr-defined]
        self._put_back()

        def step(original: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            """Run the closure (backward and all hooks), then update the parameters, unless a hook has found the step bad."""
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            skip, self._skip = self._skip, None
            if skip is not None and optimizer_device(optimizer).type == "cpu":
                skip = skip.cpu()  # parameters offloaded to the host: synchronise before the CPU kernels read it
            if skip is None:
                original(**kwargs)
            elif honours_found_inf(optimizer) and (_is_fused(optimizer) or skip.device.type != "cpu"):
                optimizer.found_inf = skip  # type: ignore[attr-defined]
                try:
                    original(**kwargs)
                finally:
                    del optimizer.found_inf  # type: ignore[attr-defined]
            elif not skip.item():
                original(**kwargs)
            return result

        self._undo = (wrap(optimizer, "step", step),)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.add(trainer, loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        self._skip = self.latest_skip = None
        mean = self._losses.take(trainer)
        if mean is not None:  # None: no backward pass ran
            norm = None if self._norm_source is None else self._norm_source.latest_norm
            if norm is None:
                norm = gradient_norm(trainer, optimizer)
            says, data = offered(pl_module, SaysStepLoss), offered_by_data(trainer, NumbersSamples)
            values = torch.stack(
                [each.to(self._good.device, torch.float32) for each in (mean if says is None else says.step_loss, norm)]
            )
            # Not `as_tensor`: copying a number to a GPU would wait for it.
            is_observed = values.new_ones((), dtype=torch.bool) if says is None else says.step_count > 0
            self._judge(values, is_observed, step, getattr(data, "step_samples", None))
        logged = is_logged(trainer, step)
        if logged or len(self._unread) >= _UNREAD_AT_MOST:
            self._read()
            if self._consecutive >= self.max_consecutive:
                assert self.diagnosis is not None
                rank_zero_warn(self.diagnosis)
                trainer.should_stop = True
        if logged:
            row = {"spike/skipped": float(self._skipped)}
            self._skipped = 0
            write_row(trainer, row, step)

    def _judge(self, values: Tensor, is_observed: Tensor, step: int, samples: range | None) -> None:
        """Test whether this step is good, set `latest_skip`, and add a good step to the window. A collective without host wait.

        Args:
            values: (2,), loss and gradient norm of the step on this rank.
            is_observed: 0-d bool, whether the step has counted targets, and so a loss.
            samples: global numbers of the step's samples, for the warning. None: unknown.
        """
        if process_count() > 1:
            # The sum has the same bits on every rank, so all ranks get the same result without further communication.
            dist.all_reduce(values)
            values = values / process_count()
        count, *sums = self._good.sum(dim=1).unbind()
        mean = torch.stack(sums) / count  # (2,)
        deviation = (self._good[1:] - mean[:, None]) * self._good[0]  # (2, window)
        std = torch.linalg.vector_norm(deviation, dim=1) / count.sqrt()
        limit = torch.where(count >= self.min_steps, mean + self.sigma * std, math.inf)
        self._first = torch.where(self._first.isnan() & values[0].isfinite(), values[0], self._first)
        is_learned = values[0].abs() < LEARNED * self._first.abs()
        usual = values.isfinite() & ((values <= limit) | is_learned)
        is_good = torch.where(is_observed, usual.all(), values[1].isfinite())
        column = torch.cat([torch.ones_like(values[:1]), values])[:, None]
        self._good = torch.where(is_good & is_observed, torch.cat([self._good[:, 1:], column], dim=1), self._good)
        self._skip = self.latest_skip = 1 - is_good.float()
        self._unread.append((step, samples, (torch.stack([self._skip, is_observed.float()]), values, limit)))

    def _read(self) -> None:
        """Read on the host the results of `_judge` since the last call, count skipped steps, and warn about them."""
        if not self._unread:
            return
        named: list[str] = []
        finite = 0
        packed = torch.cat([value for _, _, values in self._unread for value in values])
        decisions = packed.view(-1, 6).tolist()  # the only host synchronisation
        for (step, samples, _), (skip, seen, loss, norm, loss_limit, norm_limit) in zip(self._unread, decisions, strict=True):
            if self._scaler is not None and math.isfinite(loss) and not math.isfinite(norm):
                continue
            if not skip:
                self._consecutive *= not seen
                continue
            self._skipped += 1
            self._consecutive += 1
            finite += math.isfinite(loss) and math.isfinite(norm)
            ids = f", global samples {samples.start} to {samples.stop - 1}" if samples else ""
            named.append(f"{step} (loss {loss:g}, limit {loss_limit:g}; gradient norm {norm:g}, limit {norm_limit:g}{ids})")
        if named:
            more = f", and {len(named) - _NAMED_AT_MOST} more" if len(named) > _NAMED_AT_MOST else ""
            rank_zero_warn(f"SpikeGuard skipped optimizer step {', '.join(named[:_NAMED_AT_MOST])}{more}.")
        if self._consecutive >= self.max_consecutive:
            self.diagnosis = _diagnosis(self._consecutive, self._unread[-1][0], named[-1], finite > 0)
        self._unread = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._read()
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        self._read()
        count, losses, norms = self._good.tolist()
        start = count.index(1.0) if 1.0 in count else self.window
        good = {"losses": losses[start:], "norms": norms[start:]}
        return {**good, "first": self._first.item(), "skipped": self._skipped, "consecutive": self._consecutive}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        losses, norms = state_dict["losses"][-self.window :], state_dict["norms"][-self.window :]
        self._good = torch.zeros(3, self.window)
        if losses:
            self._good[:, -len(losses) :] = torch.tensor([[1.0] * len(losses), losses, norms])
        self._first = torch.tensor(float(state_dict["first"]))
        self._skipped, self._consecutive = int(state_dict["skipped"]), int(state_dict["consecutive"])


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether all parameter groups have `fused=True`. Other optimizers copy tensors for `found_inf`: slow on a CPU."""
    return all(group.get("fused") for group in optimizer.param_groups)


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` changes nothing if the tensor `optimizer.found_inf` is 1, without host synchronisation."""
    if getattr(optimizer, "honours_found_inf", False):
        return True
    # Exact types, because a subclass may replace `step`. Options of the groups, because a resume restores those.
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad) or not _is_fused(optimizer):
        return False
    # In a skipped first step, torch's fused SGD allocates the momentum without initialising it, and uses it later.
    return type(optimizer) is not SGD or all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )


def _diagnosis(consecutive: int, step: int, last: str, finite: bool) -> str:
    if finite:
        cause = (
            "The loss or the gradient norm moved to another level and stays there: training diverges (learning rate too"
            " high, batch too small) or the data changed. Resume from an older checkpoint with a lower learning rate, or, if"
            f" the new level is correct, with a larger {setting(SpikeGuard, 'sigma')}."
        )
    else:
        cause = (
            "Loss or gradients are no longer finite: the learning rate is too high, the weights diverged before a spike was"
            " detected, a batch or the initialisation is broken, or numbers are too large for the precision. Resume from an"
            " older checkpoint with a lower learning rate, or in bf16-mixed or fp32."
        )
    return (
        f"SpikeGuard stops training at optimizer step {step}: the last {consecutive} steps were all skipped"
        f" ({setting(SpikeGuard, 'max_consecutive')}). The last one was {last}. {cause} The weights are those before them."
    )
