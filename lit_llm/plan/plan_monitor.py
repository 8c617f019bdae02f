"""A callback that compares the plan of a run with measurements during `fit`, and writes plan and measurements to plan.json."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_llm.callbacks import EMA, Throughput
from lit_llm.callbacks._lightning import accumulates, callback_of
from lit_llm.callbacks.progress_bar import format_duration
from lit_llm.callbacks.ranges import check_ranges
from lit_llm.checkpoint.manifest import versions
from lit_llm.core.disk import write_text
from lit_llm.core.errors import UserError
from lit_llm.core.hardware import Hardware, this_machine
from lit_llm.core.number_domain import Domain, above
from lit_llm.core.number_text import money_range
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.plan.compute import cost_usd, flops_per_token
from lit_llm.plan.measured_run import settings_values
from lit_llm.plan.memory import peak_memory
from lit_llm.plan.planned_run import DataFacts, PlannedRun
from lit_llm.plan.speed import Options, step_times
from lit_llm.plan.weights import planned_model, total_parameters
from lit_llm.runs.plan_record import PLAN, as_text, measured_launches
from lit_llm.runs.run_folder import CONFIG
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.outcome import outcome


def print_cost(hardware: Hardware, price: float | None, devices: int, words: str, seconds: float) -> None:
    """Print the cost of `seconds` seconds: "cost: about $1.2 planned for 37m00s on h100-sxm (--plan.price)".

    Print nothing if no price is known.

    Args:
        hardware, devices: the device, and the number of devices.
        price: USD per device-hour. None: the price in the hardware table.
        words: the words between price and time ("planned for" in the example).
    """
    if (usd_hour := hardware.usd_hour(price)) is not None:
        said = money_range(*cost_usd(seconds, devices, usd_hour))
        where = f"{devices} x {hardware.name}" if devices > 1 else hardware.name
        where += f" ({'assumed price, ' if price is None else ''}--plan.price)"
        print(f"cost: {'' if said.startswith('less') else 'about '}{said} {words} {format_duration(seconds)} on {where}")


class PlanMonitor(Callback):
    """Predicts peak memory and speed when training starts, logs both, and writes predictions and measurements into plan.json.

    The measured memory is the peak of CUDA's allocator on this rank. On a CPU, only the process's resident memory is known
    (`memory/peak_gb`). Resident memory includes libraries, buffers and freed pages, and was 0.98 to 1.94 times the tensors'
    peak in six runs, so it is not compared. The measured speed is the median of `throughput/tokens_per_second`. Runs that the
    planner does not support get no prediction and no plan.json.

    Logs at logged steps from the second step on: `plan/peak_gb` (predicted); on CUDA `plan/memory_ratio` (measured /
    predicted); `plan/mfu_ratio` (`throughput/mfu` / planned MFU), if `throughput/mfu` is logged. Warns if the first value of a
    ratio differs from 1 by more than `tolerance`. If planning fails, the callback warns, and the run goes on without a
    prediction and without plan.json.

    plan.json has an entry for this launch, and for each earlier launch that measured a speed. The file is written when training
    starts and ends, and with each checkpoint. A disk error does not end the run.

    If a price is known, rank 0 prints the planned cost of the remaining steps at the start, and at the end the cost of this
    launch's training time, with validation and saving.

    Contract:
        on_train_start: predicts; rank 0 writes plan.json if the folder has a config.yaml, and prints the planned cost.
        on_train_batch_end: logs the values above, without a device synchronisation.
        on_save_checkpoint, on_train_end: rank 0 writes plan.json; at the end it prints the cost.
        State: none.

    Args:
        mfu: the planned MFU (`plan --mfu`). None: the MFU that `plan` assumes.
        tolerance: relative difference between measurement and prediction above which the callback warns.
        price: USD per device-hour (`plan --price`). None: the range of the hardware table, which has none for a processor.

    Raises:
        UserError: if an argument is out of range.
    """

    def __init__(
        self,
        mfu: Annotated[float | None, Domain(0, 1, above_low=True)] = None,
        tolerance: Annotated[float, above(0, 1000)] = 0.1,
        price: Annotated[float | None, Domain(0, 1000, above_low=True)] = None,
    ) -> None:
        check_ranges(PlanMonitor, locals())
        self.mfu, self.tolerance, self.price = mfu, tolerance, price
        self._forget()

    def _forget(self) -> None:
        self.predicted_bytes: int | None = None
        self.speeds: list[float] = []
        """Tokens per second of each logged row, at the final batch size."""
        self._planned_mfu = 0.0
        self._reported: set[str] = set()
        self._earlier: list[dict[str, Any]] = []
        self._launch: dict[str, Any] | None = None
        self._final_batch_from = 0
        self._print_cost: Callable[[str, float], None] | None = None
        self._began = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        nothing = "plan: neither memory nor speed is predicted for this run"
        try:
            self._predict(trainer, settings_of_trainer(trainer, pl_module))
        except UserError as reason:
            rank_zero_info(f"{nothing} ({reason}).")
        except Exception as error:  # a bug of the planner must not end a run
            self._forget()
            rank_zero_warn(f"{nothing}: planning failed, {type(error).__name__}: {error}")
        self._write(trainer)

    def _predict(self, trainer: Trainer, settings: PlannedRun) -> None:
        hardware = _hardware(trainer)
        options = Options(mfu=self.mfu)
        self._final_batch_from = settings.stages[-1][0]
        if settings.compute.float8:
            rank_zero_info("plan: peak memory is not predicted with compute.float8.")
        elif (memory := peak_memory(settings, cuda=hardware.is_gpu)).is_known:
            self.predicted_bytes = memory.total
        else:
            rank_zero_info(f"plan: peak memory is not predicted for this run ({'; '.join(memory.notes)}).")
        peak = settings.dense_peak(hardware)
        step = step_times(settings, hardware, options).step
        flops = flops_per_token(settings.model, settings.lora, settings.block_size).total
        if peak and step:
            self._planned_mfu = flops * settings.tokens_per_step / (step * settings.layout.devices * peak * 1e12)
        if not trainer.is_global_zero:
            return
        self._print_cost = partial(print_cost, hardware, self.price, trainer.world_size)
        left = settings.tokens - settings.tokens_before(trainer.global_step)
        run_seconds = step * left / settings.tokens_per_step if step and left > 0 else None
        if run_seconds:
            self._print_cost("planned for", run_seconds)
        self._earlier = measured_launches(Path(trainer.default_root_dir))
        self._launch = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "first_step": trainer.global_step,
            "versions": versions(),
            "machine": {"platform": platform.platform(), "threads": torch.get_num_threads()},
            "hardware": vars(hardware),
            "devices": trainer.world_size,
            "price_usd_hour": hardware.usd_hour(self.price),
            "settings": settings_values(settings),
            "parameters": total_parameters(settings.model, settings.lora),
            "flops_per_token": flops,
            "flops_per_step": flops * settings.tokens_per_step,
            "tokens_per_step": settings.tokens_per_step,
            "micro_sequences": settings.sequences,
            "accumulation": settings.accumulation,
            "peak_tflops": peak,
            "predicted": {
                "peak_bytes": self.predicted_bytes,
                "step_seconds": step,
                "tokens_per_second": settings.tokens_per_step / step if step else None,
                "mfu": self._planned_mfu or None,
                "run_seconds": run_seconds,
            },
            "measured": {},
            "ended": None,
            "complete": False,
        }

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step < 2 or step % every or accumulates(trainer):
            return
        row = {}
        speed = trainer.callback_metrics.get("throughput/tokens_per_second")
        if speed is not None and step - every >= self._final_batch_from:
            self.speeds.append(float(speed))
        if self.predicted_bytes is not None:
            row["plan/peak_gb"] = self.predicted_bytes / 1e9
            device = trainer.strategy.root_device
            if device.type == "cuda":
                measured = torch.cuda.max_memory_allocated(device)
                row["plan/memory_ratio"] = measured / self.predicted_bytes
                self._compare("peak memory", " GB", self.predicted_bytes / 1e9, measured / 1e9, "")
        mfu = trainer.callback_metrics.get("throughput/mfu")
        if mfu is not None and self._planned_mfu:
            row["plan/mfu_ratio"] = float(mfu) / self._planned_mfu
            origin = " (set --plan.mfu)" if self.mfu is None else ""
            self._compare("MFU", "", self._planned_mfu, float(mfu), origin)
        for logger in trainer.loggers if row else ():
            logger.log_metrics(row, step=step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, ended=True)
        if self._print_cost is not None:
            self._print_cost("for", time.monotonic() - self._began)

    def _write(self, trainer: Trainer, *, ended: bool = False) -> None:
        """Write plan.json if this rank has new steps or measurements since the last call, or if training has `ended`."""
        run_dir, launch = Path(trainer.default_root_dir), self._launch
        if launch is None or not (run_dir / CONFIG).is_file():
            return
        if not ended and (launch.get("last_step"), launch["measured"].get("rows")) == (trainer.global_step, len(self.speeds)):
            return
        launch["last_step"], launch["measured"] = trainer.global_step, self._measured(trainer, launch)
        if ended:
            launch["ended"], code = outcome(trainer)
            launch["complete"] = code is None
        try:
            write_text(run_dir / PLAN, as_text([*self._earlier, launch]))
        except OSError as error:
            rank_zero_warn(f"plan: {run_dir / PLAN} cannot be written: {error.strerror}.")

    def _measured(self, trainer: Trainer, launch: dict[str, Any]) -> dict[str, Any]:
        """Return {name in plan.json: value} of the measurements of this launch so far."""
        device, resident = trainer.strategy.root_device, trainer.callback_metrics.get("memory/peak_gb")
        figures: dict[str, Any] = {"rows": len(self.speeds), "trained_seconds": time.monotonic() - self._began}
        if device.type == "cuda":
            figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            figures["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        elif resident is not None:
            figures["resident_bytes"] = int(float(resident) * 1e9)
        if self.speeds:
            seconds = [launch["tokens_per_step"] / speed for speed in self.speeds]
            figures["step_seconds"] = statistics.median(seconds)
            figures["tokens_per_second"] = launch["tokens_per_step"] / figures["step_seconds"]
            figures["lowest_step_seconds"], figures["highest_step_seconds"] = min(seconds), max(seconds)
            if launch["peak_tflops"]:
                reached = figures["tokens_per_second"] * launch["flops_per_token"]
                figures["mfu"] = reached / (trainer.world_size * launch["peak_tflops"] * 1e12)
        return figures

    def _compare(self, what: str, unit: str, predicted: float, measured: float, origin: str) -> None:
        """Print how the quantity `what` differs from its prediction, once; beyond `tolerance`, as a warning.

        `unit`: text after the measured value. `origin`: text after the predicted value, how to correct it."""
        if what in self._reported:
            return
        self._reported.add(what)
        off = measured / predicted - 1
        text = f"plan: {what} {measured:.3g}{unit} measured, {predicted:.3g} planned{origin}: {off:+.1%}"
        if abs(off) > self.tolerance:
            rank_zero_warn(f"{text}, beyond {self.tolerance:.0%}.")
        else:
            rank_zero_info(text)


def _hardware(trainer: Trainer) -> Hardware:
    """Return the device of this rank. The flag `--throughput.peak_tflops`, if set, replaces the peaks of the hardware table."""
    hardware = this_machine(measure=False, device=trainer.strategy.root_device)
    given = getattr(callback_of(trainer, Throughput), "peak_tflops", None)
    return hardware if given is None else replace(hardware, peak_tflops=dict.fromkeys(hardware.peak_tflops, given))


def settings_of_trainer(trainer: Trainer, module: LightningModule) -> PlannedRun:
    """Return the planner's description of the run that `trainer` is about to start.

    Raises:
        UserError: the planner does not support the module, the data, the strategy or the precision.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(module, LanguageModel):
        raise UserError(f"the planner supports LanguageModel, not {type(module).__name__}")
    if not isinstance(data, TokenDataModule):
        raise UserError(f"the planner supports TokenDataModule, not {type(data).__name__}")
    parts = {"data": data, "loss": module.loss_config, "compute": module.compute_config, "lora": module.lora}
    parts |= {"ema": callback_of(trainer, EMA), "objective": module.objective}
    layout = layout_of(trainer.strategy, trainer.world_size, trainer.num_devices)
    if isinstance(trainer.strategy, MeshStrategy):
        layout = replace(layout, kept=trainer.strategy.kept, auto=())
    return PlannedRun.of(
        parts,
        planned_model(module.config, module.architecture),
        trainer.optimizers[0],
        layout,
        trainer.precision,
        trainer.max_steps,
        data=DataFacts(data.train_tokens, data.val_tokens, "counted"),
    )
