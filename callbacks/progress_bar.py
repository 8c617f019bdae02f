"""A progress bar that counts optimizer steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from ._lightning import _AfterSteps, is_logged
from .contracts import KnowsNorm, SaysStepLoss, offered

# Metrics in a line after the loss: name, label, format.
_SHOWN = (
    ("train/perplexity", "ppl", "{:.4g}"),
    ("lr", "lr", "{:.2e}"),
    ("grad/norm", "grad", "{:.3g}"),
)
_REFRESH_SECONDS = 0.1
_LINE_SECONDS = 30.0  # between two lines of a validation in a log file


def format_duration(seconds: float) -> str:
    """Write seconds in two units: 7 → "7s", 187 → "3m07s", 11107 → "3h05m", 93600 → "1d02h"."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_count(number: float) -> str:
    """Write a number with three significant digits and a unit: 873 → "873", 45200 → "45.2k", 1234000 → "1.23M"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:  # 999.5k rounds to 1000k, so print 1M
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def format_metrics(metrics: Mapping[str, float], loss: str = "train/loss", steps: int = 1) -> str:
    """Text like "loss 2.3456 (mean of 10)  ppl 10.44  lr 3.00e-04  grad 0.42  45.2k tok/s", without missing metrics.

    Args:
        loss: name of the metric shown as loss.
        steps: number of steps over which the loss was averaged.
    """
    shown = ((loss, "loss", "{:.4f}" + (f" (mean of {steps})" if steps > 1 else "")), *_SHOWN)
    parts = [f"{label} {form.format(metrics[name])}" for name, label, form in shown if name in metrics]
    if "throughput/tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['throughput/tokens_per_second'])} tok/s")
    return "  ".join(parts)


def format_line(
    step: int,
    max_steps: int,
    metrics: Mapping[str, float],
    eta_seconds: float | None,
    loss: str = "train/loss",
    steps: int = 1,
) -> str:
    """Text like "step 100/2000  loss 2.3456 …  ETA 3m07s"; no total if `max_steps` is -1, no ETA if `eta_seconds` is None."""
    count = f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps >= 0 else f"step {step}"
    parts = [count, format_metrics(metrics, loss, steps)]
    if eta_seconds is not None:
        parts.append(f"ETA {format_duration(eta_seconds)}")
    return "  ".join(part for part in parts if part)


class TrainingProgress(_AfterSteps, ProgressBar):
    """Shows the optimizer step, loss, perplexity, learning rate, gradient norm, tokens/s and remaining time.

    One step's loss (the metric `train/loss`) is noisy. So if the module has `step_loss` (`SaysStepLoss` in `contracts.py`), the
    shown loss is the mean over all counted (not ignored) targets since the last line. The perplexity is e to the shown loss. It
    is absent if the module logs no perplexity, as with a loss of pairs. "(mean of 9)": 9 steps had a counted target.

    On a terminal: one bar, redrawn at logged steps and otherwise at most ten times a second, and a second bar during
    validation. Elsewhere (a log file, CI): one plain line per logged step and for the last step, and one line every 30 seconds
    of a validation. In both cases, one line is printed with the result of each validation.

    Reads the loss, `train/perplexity`, `lr`, `grad/norm` and `throughput/tokens_per_second` from
    `trainer.callback_metrics`; metrics that are missing there are not shown. ETA, the remaining time, is time per step ×
    remaining steps. The time per step is the mean in this process, with validation and saving, without the first step.

    Logs: nothing.

    Contract:
        on_train_start: opens the bar at the resumed step.
        on_train_batch_end: draws the bar or prints the line.
        on_validation_*: draw the second bar and print the result, except in the sanity check.
        on_train_end: shows the loss of the steps since the last line, and closes the bars.
        on_exception, teardown: close the bars.
        State: none. Rank 0 only.

    Args:
        loss: name of the metric shown as loss.
    """

    def __init__(self, loss: str = "train/loss") -> None:
        super().__init__()
        self.loss = loss
        self._enabled = True
        self._bar: Tqdm | None = None
        self._val_bar: Tqdm | None = None
        self._val_since = self._val_said = 0.0
        self._val_done = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether this callback prints anything. `LightningModule.print` reads this property."""
        return self._enabled

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar; if there is no bar, print as usual."""
        text = kwargs.pop("sep", " ").join(map(str, args))
        if self._bar is not None:
            self._bar.write(text, **kwargs)
        elif self._enabled:
            print(text, **kwargs, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._drawn = 0.0  # time of the last drawing
        self._first: tuple[int, float] | None = None  # the first step of this process and the time of its end
        # Since the last line: sum of the loss over counted targets, number of counted targets, number of steps with any.
        self._unsaid: list[Tensor | float] = [0.0, 0.0, 0.0]
        self._unsaid_steps = 0
        if self._enabled and sys.stdout.isatty():
            sized = trainer.max_steps >= 0
            self._bar = Tqdm(
                desc="step",
                initial=trainer.global_step,
                total=trainer.max_steps if sized else None,
                file=sys.stdout,
                dynamic_ncols=True,
                bar_format="step {n_fmt}/{total_fmt} |{bar}| {postfix}" if sized else "step {n_fmt} {postfix}",
            )

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if not self._enabled:
            return
        says = offered(pl_module, SaysStepLoss) if self.loss == "train/loss" else None
        if says is not None:
            self._add(says)
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        is_last = step == trainer.max_steps
        if is_logged(trainer, step):
            metrics = _floats(trainer)
            self._show(trainer, step, metrics, 1 if says is None else self._replace_by_mean(metrics))
        elif is_last and says is not None:
            self._show_rest(trainer)
        elif self._bar is not None and (is_last or now - self._drawn >= _REFRESH_SECONDS):
            self._draw(step, now, "" if is_last else None)  # at the last step, clear the metrics of an earlier one

    def _show_rest(self, trainer: Trainer) -> None:
        """Show the mean loss of the steps since the last line, none of which was a logged step, and the last rate and norm."""
        metrics = {"train/perplexity": 0.0} if "train/perplexity" in trainer.callback_metrics else {}
        if "lr" in trainer.callback_metrics and not trainer.lr_scheduler_configs:  # torch's have set the rate of the next step
            metrics["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (knows := offered(callback, KnowsNorm)) is not None and knows.latest_norm is not None:
                metrics["grad/norm"] = float(knows.latest_norm)
        self._show(trainer, trainer.global_step, metrics, self._replace_by_mean(metrics))

    def _show(self, trainer: Trainer, step: int, metrics: Mapping[str, float], steps: int) -> None:
        now = time.monotonic()
        eta = self._eta(step, trainer.max_steps, now)
        if self._bar is None:
            self.print(format_line(step, trainer.max_steps, metrics, eta, self.loss, steps))
        else:
            text = format_metrics(metrics, self.loss, steps)
            self._draw(step, now, text if eta is None else f"{text}  ETA {format_duration(eta)}")

    def _add(self, says: SaysStepLoss) -> None:
        """Add a step's loss to the sum `_unsaid`, on the device. A step without a counted target (loss NaN) adds nothing."""
        counted = says.step_count > 0
        self._unsaid[0] = self._unsaid[0] + torch.where(counted, says.step_loss.detach() * says.step_count, 0.0)
        self._unsaid[1] = self._unsaid[1] + says.step_count
        self._unsaid[2] = self._unsaid[2] + counted
        self._unsaid_steps += 1

    def _replace_by_mean(self, metrics: dict[str, float]) -> int:
        """In `metrics`, replace the loss by its mean over the steps since the last call, and the perplexity by e to this mean;
        remove both if no target of these steps counted. Sets the sum `_unsaid` to 0. Returns the number of steps that had
        counted targets.
        """
        total, count, steps = map(float, self._unsaid)
        self._unsaid, self._unsaid_steps = [0.0, 0.0, 0.0], 0
        metrics.pop(self.loss, None)
        has_perplexity = metrics.pop("train/perplexity", None) is not None
        if count:
            metrics[self.loss] = total / count
            if has_perplexity:
                metrics["train/perplexity"] = math.exp(min(total / count, 700.0))
        return round(steps)

    def _eta(self, step: int, max_steps: int, now: float) -> float | None:
        assert self._first is not None
        first, since = self._first
        if max_steps < 0 or step == first:
            return None
        return (max_steps - step) * (now - since) / (step - first)

    def _draw(self, step: int, now: float, postfix: str | None) -> None:
        assert self._bar is not None
        self._bar.n = step
        if postfix is not None:
            self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.refresh()
        self._drawn = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not self._enabled:
            return
        self._val_since = self._val_said = time.monotonic()
        self._val_done = 0
        if sys.stdout.isatty():
            batches = sum(trainer.num_val_batches)
            self._val_bar = Tqdm(
                desc="validating",
                total=batches if batches != float("inf") else None,
                file=sys.stdout,
                leave=False,
                dynamic_ncols=True,
                mininterval=_REFRESH_SECONDS,
                position=0 if self._bar is None else 1,
            )

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.sanity_checking or not self._enabled:
            return
        self._val_done += 1
        if self._val_bar is not None:
            self._val_bar.update()
        elif time.monotonic() - self._val_said >= _LINE_SECONDS:
            self._val_said = time.monotonic()
            batches = sum(trainer.num_val_batches)
            total = "" if batches == float("inf") else f" of {batches:.0f}"
            self.print(f"validating after step {trainer.global_step}: batch {self._val_done}{total}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not self._enabled:
            return
        self._close_validation()
        if trainer.state.fn == "fit":  # `trainer.validate` prints its own table
            values = "  ".join(f"{name} {value:.5g}" for name, value in _floats(trainer).items() if name.startswith("val"))
            seconds = format_duration(time.monotonic() - self._val_since)
            self.print(f"validation after step {trainer.global_step}: {values}  ({seconds})")

    def _close_validation(self) -> None:
        if self._val_bar is not None:
            self._val_bar.close()
            self._val_bar = None

    def _close(self, *_: Any, stage: str = "") -> None:
        self._close_validation()
        if self._bar is not None:
            self._bar.n = self._step
            self._bar.close()
            self._bar = None

    on_exception = teardown = _close  # type: ignore[assignment]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled and self._unsaid_steps:  # training ended before `max_steps`
            self._show_rest(trainer)
        self._close()


def _floats(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
