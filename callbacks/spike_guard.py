"""Skips optimizer steps that would harm the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ._lightning import is_logged, wrap, write_row
from ._torch import unscales_by_itself
from .errors import ConfigurationError
from .gradient_norm_and_clipping import total_norm

_UNREAD_AT_MOST = 128
_NAMED_AT_MOST = 3


class SpikeGuard(Callback):
    """Skips the optimizer step whose loss or gradient norm is not finite, or above mean + sigma · std of the last good ones.

    A skipped step leaves parameters, moments and the optimizer's step counters bit for bit as if it had not been made,
    and its loss and norm do not enter the window. It still counts as a step for the trainer: the schedule and the data
    go on. (Buffers that a forward pass writes, as BatchNorm's, are not undone.) All ranks decide alike, from the mean over
    ranks. The loss is the mean over the step's micro-batches, the norm is the one before clipping.

    The decision is made on the device. Optimizers that honour `found_inf` act on it there and the host never waits:
    torch's Adam, AdamW, SGD and Adagrad with `fused=True`, and any with a class attribute `honours_found_inf = True`. For
    every other optimizer the host reads the decision once a step and does not call it: slower, on a GPU by the wait for the
    step's backward. So also, on a CPU, for all but fused ones, since reading is free there; and for torch's fused SGD before
    its first good step, which would keep an unwritten momentum.

    Under fp16 loss scaling, a norm that is not finite while the loss is finite is handled by the scaler, which skips the step
    and lowers the scale. It does not enter the window either, and is not reported.

    Logs, at logged steps: `spike/skipped`, the number of steps skipped since the last row. A warning names them, with the
    global sample numbers where the data module has `step_samples`, a range. After `max_consecutive` in a row, noticed at a
    logged step, training stops (`trainer.should_stop`), with the reason in `diagnosis`, else None; the weights are then
    those of the last good step.

    Contract:
        on_train_start: wraps `optimizer.step`, which then applies the decision; teardown, on_exception: unwraps it.
        on_before_backward: adds up the loss of the micro-batches.
        on_before_optimizer_step: decides; at logged steps (or after 128 others) reads the decisions of the steps since.
            It takes the norm from a callback with `latest_norm` (GradientNorm) that comes before it, else computes it.
        State: the window, skipped steps since the last row and in a row; plain types.
    Cost: under 0.1 ms a step on one CPU core, some 30 kernels of a few hundred elements; on several ranks one all-reduce of
    8 bytes.

    Args:
        window: good steps that are looked back on.
        sigma: standard deviations above their mean that are still good.
        min_steps: good steps there must be before a finite value can be called a spike.
        max_consecutive: skipped steps in a row after which training stops.

    Raises:
        ConfigurationError: numbers out of range; several optimizers; LBFGS, which evaluates a step several times; fp16 loss
            scaling with an optimizer that unscales by itself (fused), whose gradients are still scaled when they are judged.
    """

    def __init__(self, window: int = 128, sigma: float = 6.0, min_steps: int = 32, max_consecutive: int = 10) -> None:
        if window < 2:
            raise ConfigurationError(f"window is {window} but must be >= 2 (--spike_guard.window).")
        if not sigma > 0:
            raise ConfigurationError(f"sigma is {sigma} but must be above 0 (--spike_guard.sigma).")
        if not 2 <= min_steps <= window:
            raise ConfigurationError(
                f"min_steps is {min_steps} but must be in [2, window = {window}] (--spike_guard.min_steps)."
            )
        if max_consecutive < 1:
            raise ConfigurationError(f"max_consecutive is {max_consecutive} but must be >= 1 (--spike_guard.max_consecutive).")
        self.window = window
        self.sigma = sigma
        self.min_steps = min_steps
        self.max_consecutive = max_consecutive
        self.diagnosis: str | None = None
        # Rows: 1 where there is a step, its loss, its norm. Oldest first; zeros before the first step.
        self._good = torch.zeros(3, window)
        self._loss: Tensor | None = None  # of the micro-batches so far
        self._skip: Tensor | None = None  # 0-d: 1.0 if the step being made is to be skipped, else 0.0
        # Step, its samples, and (skip, (loss, norm), their limits) on the device.
        self._unread: list[tuple[int, range | None, tuple[Tensor, ...]]] = []
        self._skipped = 0  # since the last row
        self._consecutive = 0
        self._scaler: Any = None
        self._norm_source: Any = None
        self._unwrap: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"SpikeGuard guards one optimizer, but {type(pl_module).__name__} has {len(trainer.optimizers)}:"
                " remove --spike_guard."
            )
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "SpikeGuard judges a step once, but LBFGS evaluates it several times: remove --spike_guard."
            )
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._scaler is not None and unscales_by_itself(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__}(fused=True) unscales 16-mixed gradients itself, after they would be judged:"
                " use --trainer.precision bf16-mixed, or an optimizer with fused=False."
            )
        self._good = self._good.to(trainer.strategy.root_device)
        self._loss, self._skip, self._unread, self.diagnosis = None, None, [], None
        self._norm_source = next((c for c in trainer.callbacks if hasattr(c, "latest_norm")), None)  # type: ignore[attr-defined]
        self._wrap(optimizer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        loss = loss.detach().float().reshape(())
        if self._scaler is not None:
            loss = loss / self._scaler.scale(torch.ones((), device=loss.device))
        self._loss = loss if self._loss is None else self._loss + loss  # Lightning has divided by their number

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        self._skip = None
        if self._loss is not None:  # otherwise nothing was back-propagated
            norm = getattr(self._norm_source, "latest_norm", None)
            if norm is None:
                norm = total_norm(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            device = self._good.device
            observed = torch.stack([self._loss.to(device), norm.to(device, torch.float32)])
            self._loss = None
            self._judge(observed, step, getattr(getattr(trainer, "datamodule", None), "step_samples", None))
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

    def _judge(self, observed: Tensor, step: int, samples: range | None) -> None:
        """Decide about `observed`: (2,) loss and norm of this step. Nothing here waits for the device."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # One sum, the same bits on every rank, so all ranks decide alike without further communication.
            dist.all_reduce(observed)
            observed = observed / dist.get_world_size()
        count, *sums = self._good.sum(dim=1).unbind()
        mean = torch.stack(sums) / count  # (2,)
        deviation = (self._good[1:] - mean[:, None]) * self._good[0]  # (2, window)
        std = torch.linalg.vector_norm(deviation, dim=1) / count.sqrt()
        limit = torch.where(count >= self.min_steps, mean + self.sigma * std, math.inf)
        is_good = (observed.isfinite() & (observed <= limit)).all()
        column = torch.cat([torch.ones_like(observed[:1]), observed])[:, None]
        self._good = torch.where(is_good, torch.cat([self._good[:, 1:], column], dim=1), self._good)
        self._skip = 1 - is_good.float()
        self._unread.append((step, samples, (self._skip.view(1), observed, limit)))

    def _read(self) -> None:
        """Learn on the host what was decided since the last time, and say which steps were skipped."""
        if not self._unread:
            return
        named: list[str] = []
        finite = 0
        packed = torch.cat([value for _, _, values in self._unread for value in values])
        decisions = packed.view(-1, 5).tolist()  # the one wait for the device
        for (step, samples, _), (skip, loss, norm, loss_limit, norm_limit) in zip(self._unread, decisions, strict=True):
            if self._scaler is not None and math.isfinite(loss) and not math.isfinite(norm):
                continue
            if not skip:
                self._consecutive = 0
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

    def _wrap(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step` look at the decision between the closure (backward and all hooks) and the update."""
        self._restore()

        def step(original: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            skip, self._skip = self._skip, None
            if skip is not None and optimizer.param_groups[0]["params"][0].device.type == "cpu":
                skip = skip.cpu()  # parameters offloaded to the host: what acts on them must not read it too early
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

        self._unwrap = wrap(optimizer, "step", step, "SpikeGuard")

    def _restore(self) -> None:
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._read()
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def state_dict(self) -> dict[str, Any]:
        self._read()
        count, losses, norms = self._good.tolist()
        start = count.index(1.0) if 1.0 in count else self.window
        good = {"losses": losses[start:], "norms": norms[start:]}
        return {**good, "skipped": self._skipped, "consecutive": self._consecutive}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        losses, norms = state_dict["losses"][-self.window :], state_dict["norms"][-self.window :]
        self._good = torch.zeros(3, self.window)
        if losses:
            self._good[:, -len(losses) :] = torch.tensor([[1.0] * len(losses), losses, norms])
        self._skipped, self._consecutive = state_dict["skipped"], state_dict["consecutive"]


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether `found_inf` costs nothing. Elsewhere it is paid for in copies, and on a CPU reading the decision is free."""
    return all(group.get("fused") for group in optimizer.param_groups)


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether, with `optimizer.found_inf` set to 1, `step` leaves everything as it was, deciding so on the device."""
    if getattr(optimizer, "honours_found_inf", False):
        return True
    # Not subclasses: their `step` may do anything. Not what __init__ was told: a resume restores the groups' options.
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad) or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # In a skipped first step, torch's fused SGD allocates the momentum, leaves it unwritten, and uses it from then on.
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
            "The loss or the gradient norm has moved to another level and stays there: training diverges (learning rate too"
            " high, batch too small) or the data changed. Resume from an older checkpoint with a lower learning rate; if the"
            " new level is right, with a larger --spike_guard.sigma."
        )
    else:
        cause = (
            "Loss or gradients are no longer finite: learning rate too high, an explosion that began before it was noticed,"
            " a broken batch or initialisation, or numbers too large for the precision. Resume from an older checkpoint with"
            " a lower learning rate, or in bf16-mixed or fp32."
        )
    return (
        f"SpikeGuard stops training at optimizer step {step}: the last {consecutive} steps were all skipped"
        f" (--spike_guard.max_consecutive), lastly {last}. {cause} The weights are those before these steps."
    )
