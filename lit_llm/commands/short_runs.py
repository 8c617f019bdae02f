"""Short runs of a recipe for `find-lr` and `find-batch`. The runs write nothing: no run folder, checkpoint or log."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lit_llm import callbacks
from lit_llm.config.arguments import Arguments
from lit_llm.config.build import ONE_DEVICE, build
from lit_llm.config.devices import devices_of
from lit_llm.config.objects import RunObjects
from lit_llm.config.resolve import decide, read_spec
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import dump_yaml
from lit_llm.data import TokenDataModule
from lit_llm.data.run_length import steps_of_run
from lit_llm.plan.host_memory import memory_problem
from lit_llm.training.language_model import LanguageModel

_QUIET: dict[str, Any] = {
    **ONE_DEVICE,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "min_steps": None,
    "min_epochs": None,
}

Planned = Callable[[int, float], float]
"""A function of (number of the update from 1 on, configured rate) that returns the rate by the recipe's schedule."""
Rate = Callable[[int, str, float, Planned], float]
"""A function that returns the rate of a parameter group. Its arguments: the number of the update from 1 on, the option that
sets the group's rate (`lr`, `adamw_lr`), the value of this option, and the schedule."""
Ends = Callable[[Sequence[float]], bool]
"""A function that gets the losses of all steps so far, after each step, and returns whether to end the run."""


def _not_finite(losses: Sequence[float]) -> bool:
    return not math.isfinite(losses[-1])


class ShortRuns:
    """Trainer of short runs: each trains a recipe's model from the start for some steps, with given learning rates and seed.

    Model, data, optimizer, precision, accumulation and clipping are the recipe's, on one device. Callbacks that do not change
    the weights are left out: validation, samples, checkpoints, logging, EMA. Also left out are the spike guard, which would
    hide a rate that is too high, a batch ramp, and the user's own callbacks.

    Attributes:
        rates: {option of the optimizer: the recipe's rate}. MuonAdamW has two options: lr (Muon) and adamw_lr.
        steps: number of optimizer steps of the recipe's run.
        done: number of optimizer steps of all short runs so far.
        devices: the number of the recipe's devices. Short runs use one device.
        from_weights: whether the run starts from trained weights (`init_from`).
        has_adapters: whether the run trains adapters (`lora`).
        data_options: {argument of the data module: value that later runs use instead of the recipe's}.

    Raises:
        UserError: `fit` would refuse the recipe; the number of steps is not set; the optimizer has no option `lr`; the schedule
            is `Decay`.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.data_options: dict[str, Any] = {}
        self._notes_said = False
        self._precision: Any = None
        with self._built({}, 0, _QUIET) as built:
            chosen = built.config.optimizer.init_args.as_dict()
            self.steps: int = _steps_of(built)
            self.seed = int(built.config.seed_everything)
            self.class_path: str = built.config.optimizer.class_path
            self.data = built.datamodule
            schedule = built.parts.get("schedule")
            self.from_weights: bool = built.config.init_from is not None
            self.has_adapters: bool = built.config.lora is not None
            self.devices = devices_of(built.config.trainer.devices, built.config.trainer.num_nodes or 1)
        self.rates: dict[str, float] = {key: chosen[key] for key in ("lr", "adamw_lr") if chosen.get(key) is not None}
        self.done = 0
        if self.steps == -1:
            raise UserError("the run has no length, and the best rate depends on it: set --trainer.max_steps")
        if isinstance(schedule, callbacks.Decay):
            raise UserError("Decay continues with the rates of a checkpoint, so there is none to find (--schedule)")
        if "lr" not in self.rates:
            raise UserError(f"{self.class_path} has no option lr, so there is no rate to find (--optimizer)")

    def tenth(self, least: int) -> int:
        """Return a tenth of the steps of the recipe's run, but at least `least`, and at most all steps."""
        return min(self.steps, max(least, round(0.1 * self.steps)))

    def sweep(self, key: str, rates: Sequence[float], ends: Ends, *, seed: int) -> list[float]:
        """Return each step's loss in a run whose rate `key` is `rates[i]` in step i + 1, while other rates are constant.

        The run has no schedule. It ends early if `ends(losses)` is true."""

        def rate(t: int, of: str, configured: float, planned: Planned) -> float:
            return configured * (rates[t - 1] / rates[0] if of == key else 1.0)

        return self._run({key: rates[0]}, seed, len(rates), rate, ends)

    def probe(self, rates: dict[str, float], steps: int, *, seed: int, observers: Sequence[Callback] = ()) -> list[float]:
        """Return the loss of each step of a run whose schedule is compressed to `steps` steps. A loss of inf or NaN ends it."""

        def compressed(t: int, of: str, configured: float, planned: Planned) -> float:
            return planned(max(1, round(t * self.steps / steps)), configured)

        return self._run(rates, seed, steps, compressed, _not_finite, observers)

    def observe(
        self,
        steps: int,
        observers: Sequence[Callback],
        *,
        seed: int,
        rates: dict[str, float] | None = None,
        ends: Ends = _not_finite,
        frozen_after: int | None = None,
    ) -> list[float]:
        """Return the loss of each of the first `steps` steps of the recipe's run, with the recipe's schedule.

        Args:
            observers: callbacks that observe the run.
            rates: {option of the optimizer: rate that replaces the recipe's}. None: all rates are the recipe's.
            ends: function of the losses so far that says whether the run ends early.
            frozen_after: the step after which all rates are 0, so that weights do not change. None: no such step.
        """
        end = self.steps if frozen_after is None else frozen_after

        def unchanged(t: int, of: str, configured: float, planned: Planned) -> float:
            return 0.0 if t > end else planned(t, configured)

        return self._run(rates or {}, seed, steps, unchanged, ends, observers)

    def _run(
        self, rates: dict[str, float], seed: int, steps: int, rate: Rate, ends: Ends, observers: Sequence[Callback] = ()
    ) -> list[float]:
        with self._built(rates, seed, {**_QUIET, "max_steps": self.steps, "max_epochs": -1}) as built:
            trainer, schedule = built.trainer, built.parts.get("schedule")
            if schedule is not None:
                schedule.resolve(trainer)
            planned: Planned = schedule.rate if schedule is not None else lambda t, configured: configured
            steered = _Steered(rate, planned, tuple(self.rates), min(steps, self.steps), ends)
            kept = [c for c in trainer.callbacks if isinstance(c, callbacks.GradientNorm | callbacks.StepSeed)]  # type: ignore[attr-defined]
            trainer.callbacks = [steered, *observers, *kept]  # type: ignore[attr-defined]
            try:
                trainer.fit(built.model, datamodule=built.datamodule)
            except SystemExit:  # Lightning turns a KeyboardInterrupt into it
                raise KeyboardInterrupt from None
        self.done += len(steered.losses)
        return steered.losses or [math.nan]  # no step had a target

    @contextmanager
    def _built(self, rates: dict[str, float], seed: int, limits: dict[str, Any]) -> Iterator[RunObjects]:
        """Yield the objects of the recipe, built with these rates. Each seed gives other initial weights and other data order.

        `limits`: arguments of the Trainer that replace the recipe's.
        """
        settings: dict[str, Any] = {"batch_ramp": None}
        settings |= {f"data.init_args.{key}": value for key, value in self.data_options.items()}
        settings |= {f"optimizer.init_args.{key}": rate for key, rate in rates.items()}
        spec = read_spec("fit", self._arguments)
        if self._notes_said:
            settings |= {"trainer.precision": self._precision, "seed_everything": self.seed + seed}
            spec = replace(spec, notes=())
        with tempfile.TemporaryDirectory(prefix="lit_llm-find-") as folder:
            spec = decide(spec.with_settings(settings), run_dir=Path(folder))
            built = build(spec, trainer=limits, memory=memory_problem)
            self._notes_said, self._precision = True, built.config.trainer.precision
            if seed and hasattr(built.datamodule, "seed"):
                built.datamodule.seed += seed
            yield built


def _steps_of(built: RunObjects) -> int:
    """Return the number of optimizer steps of the recipe's run; -1 if neither max_steps nor max_epochs is set."""
    data, limits = built.datamodule, built.config.trainer
    if isinstance(data, TokenDataModule) and limits.max_epochs not in (None, -1):
        data.prepare_data()
        data.setup()
        return steps_of_run(data, limits.max_steps, limits.max_epochs)
    return limits.max_steps


class _Steered(Callback):
    """Callback that sets the rates of each step, and records the step's loss; of a step without targets, a neighbour step's."""

    def __init__(self, rate: Rate, planned: Planned, keys: tuple[str, ...], steps: int, ends: Ends) -> None:
        self.rate, self.planned, self.keys, self.steps, self.ends = rate, planned, keys, steps, ends
        self.losses: list[float] = []
        self._steps = 0
        self._configured: list[tuple[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = trainer.optimizers[0].param_groups
        self._configured = [(option_of(group, self.keys), float(group["lr"])) for group in groups]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        groups = trainer.optimizers[0].param_groups
        for group, (key, configured) in zip(groups, self._configured, strict=True):
            group["lr"] = self.rate(trainer.global_step + 1, key, configured, self.planned)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert isinstance(pl_module, LanguageModel)
        self._steps += 1
        if pl_module.step_count:
            self.losses += [float(pl_module.step_loss)] * (self._steps - len(self.losses))
        elif self.losses:
            self.losses.append(self.losses[-1])
        if self._steps == self.steps or (self.losses and self.ends(self.losses)):
            trainer.should_stop = True


def option_of(group: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the option that sets the rate of a parameter group: `adamw_lr` for AdamW groups of MuonAdamW, otherwise `lr`."""
    return "adamw_lr" if "adamw_lr" in keys and group.get("algorithm") == "adamw" else "lr"


def overlay_text(settings: dict[str, Any], command: str) -> str:
    """Return the YAML text of an overlay with these settings, below a comment with the command line that found them."""
    return "".join(f"# {line}\n" for line in command.splitlines()) + dump_yaml(settings)
