"""A recipe for the planner: checked like `fit`, for any devices, without a run folder and without its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lit_llm import callbacks
from lit_llm.callbacks.learning_rate_schedules import rate_curves
from lit_llm.config.arguments import Arguments
from lit_llm.config.build import ONE_DEVICE, build
from lit_llm.config.devices import OtherMachine
from lit_llm.config.resolve import read_spec
from lit_llm.config.run_spec import RunSpec
from lit_llm.core._lightning import set_max_steps
from lit_llm.core.batch_sizes import steps_for
from lit_llm.core.errors import UserError
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.optim import optimizer_of
from lit_llm.plan.built_model import build_gpt, build_own
from lit_llm.plan.dataset_size import data_facts, with_packing
from lit_llm.plan.planned_settings import run_settings
from lit_llm.plan.run_settings import RunSettings, Schedule
from lit_llm.plan.weights import planned_model
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_plan
from lit_llm.runs.run_folder import default_run_dir
from lit_llm.training.auto_precision import Choice

VOCABULARY = 50257
"""GPT-2's vocabulary size, used if neither the recipe nor the data have one."""

# Trainer settings are checked on one CPU, so that the devices of the plan need not be here.
_ONE_CPU = {**ONE_DEVICE, "accelerator": "cpu", "precision": None, "plugins": None}


class PlannedRecipe:
    """A recipe, and the settings that the planner takes from it. `notes` lists the assumptions, one sentence each.

    Args:
        arguments: the arguments of `fit`.
        devices: number of devices instead of the recipe's trainer.devices and num_nodes.
        devices_per_node: devices in a node of the planned hardware.
        precision: the meaning of trainer.precision auto on that hardware; None: as on this machine.

    Raises:
        UserError: Everything that `fit` would refuse, one sentence a line. Data files may be missing.
    """

    def __init__(
        self,
        arguments: Arguments | list[str],
        *,
        devices: int | None = None,
        devices_per_node: int = 8,
        precision: Choice | None = None,
    ) -> None:
        spec = read_spec("fit", arguments)
        machine = OtherMachine(devices, devices_per_node, _start(spec), precision)
        run_dir = default_run_dir(spec.arguments.config_files)  # nothing is written there
        self.built = build(spec, run_dir=run_dir, trainer=_ONE_CPU, machine=machine)
        self.config, self.datamodule = self.built.config, self.built.datamodule
        self.devices, self.devices_per_node = machine.devices_for(self.config), devices_per_node
        self.notes: list[str] = []

    def layout(self, devices: int, devices_per_node: int) -> Layout:
        """The layout of the recipe's strategy on other devices."""
        return layout_of(self.built.strategy or "auto", devices, devices_per_node)

    def settings(self) -> RunSettings:
        """The run in plain numbers. Adds notes.

        Raises:
            UserError: The run cannot be planned: the data module has no batch sizes, or the precision is unknown.
        """
        data, built = self.datamodule, self.built
        compute, gpt = built.spec.compute, built.spec.model
        assert compute is not None and gpt is not None
        if built.architecture is not None and (compute.compile or compute.float8):
            self.notes.append(f"{built.architecture.class_path} is planned as eager code (--compute.compile, .float8)")
        facts, vocab_size = data_facts(data, missing=bool(built.missing_data))
        if built.missing_data:
            facts = replace(facts, origin=f"unknown: {' '.join(built.missing_data)}")
        if getattr(data, "packing", "concatenate") == "best_fit":
            facts = with_packing(facts, data, missing=bool(built.missing_data))
            if facts.sequences is None and facts.phases:
                self.notes.append("epochs of packed sources are estimated without padding, so they will be more")
        if getattr(data, "global_batch_size", None) is None:
            raise UserError(f"{type(data).__name__} has no global_batch_size, so it cannot be planned (--data)")
        vocab_size = gpt.vocab_size or vocab_size
        if vocab_size is None:
            vocab_size = VOCABULARY
            self.notes.append(f"the vocabulary is unknown, GPT-2's {VOCABULARY:,} is assumed (--model.vocab_size)")
        model = planned_model(replace(gpt, vocab_size=vocab_size), built.architecture)
        optimizer, ramp = built.optimizer, getattr(data, "ramp", None)
        assert optimizer is not None
        settings = run_settings(
            built.parts,
            model,
            optimizer,
            self.layout(self.devices, self.devices_per_node),
            self.config.trainer.precision,
            steps=self.config.trainer.max_steps,
            data=facts,
            background_saves=self.config.async_checkpoints,
            sharded_saves=self.config.sharded_checkpoints,
        )
        settings = replace(settings, steps=self._steps(settings))
        length = settings.sequence_length
        if length != model.block_size:
            self.notes.append(
                f"figures are of sequences of data.block_size = {length} tokens, not of model.block_size = {model.block_size}"
            )
        if ramp is not None:
            self.notes.append(
                f"batch_ramp: {settings.tokens:,} tokens in total. Per-step figures describe the final batch; "
                "total time and cost assume its speed throughout"
            )
        kind = settings.schedule.kind
        if kind == "Decay":
            self.notes.append("Decay starts at the resumed checkpoint; the plan assumes that it starts at step 1")
        rate = self._rate(settings.steps)
        return replace(settings, schedule=Schedule(kind, lambda step: rate(step, 1.0), self._rates(settings, rate)))

    def _steps(self, settings: RunSettings) -> int:
        """The step at which `fit` ends, by `max_steps` or `max_epochs`, whichever is first. Adds a note if it is unknown."""
        steps, epochs = settings.steps, self.config.trainer.max_epochs
        if steps == -1:
            return steps_of_epochs(settings, epochs)
        if epochs in (None, -1):
            return steps
        if not settings.data.train_tokens:
            self.notes.append(
                f"the size of the dataset is unknown, so the run may end before its {steps:,} steps (--trainer.max_epochs)"
            )
            return steps
        return min(steps, steps_of_epochs(settings, epochs))

    def _rates(self, settings: RunSettings, rate: Callable[[int, float], float]) -> Callable[[int], dict[str, float]]:
        """A function from a step to its rates, by the names of the curves that `fit` logs."""

        @cache
        def peaks() -> dict[str, float]:
            model, own = settings.model, self.built.architecture
            whole = build_gpt(settings.gpt, settings.lora) if own is None else build_own(own, model.vocab_size)
            groups = optimizer_of(whole, self.built.model.optimizer_factory).param_groups
            return {name: groups[i]["lr"] for name, i in rate_curves(groups, [group["lr"] for group in groups]).items()}

        return lambda step: {name: rate(step, float(peak)) for name, peak in peaks().items()}

    def _rate(self, steps: int) -> Callable[[int, float], float]:
        """The learning rate as a function of the step and the peak rate."""
        schedule: callbacks.Schedule | None = self.built.parts.get("schedule")
        if schedule is None:
            return lambda step, peak: peak
        if isinstance(schedule, callbacks.Decay):
            schedule.load_state_dict({"began": 0, "rates": []})
        set_max_steps(self.built.trainer, steps)
        schedule.resolve(self.built.trainer)
        return schedule.rate


def steps_of_epochs(settings: RunSettings, epochs: int | None) -> int:
    """Number of optimizer steps in `epochs` epochs.

    Raises:
        UserError: the size of the data is unknown.
    """
    data = settings.data
    if not data.train_tokens or epochs in (None, -1):
        raise UserError("The number of steps depends on the size of the dataset, which is unknown: set --trainer.max_steps.")
    assert epochs is not None
    return steps_for(settings.stages, epochs * (data.sequences or (data.train_tokens - 1) // settings.sequence_length))


def _start(spec: RunSpec) -> RunStart:
    """Where the planned run starts: a run that `--run` names, where `--resume auto` would continue it; others at step 0."""
    config, arguments = spec.config, spec.arguments
    named = arguments.asks_for("run_dir") is not None
    resume = config.resume if arguments.asks_for("resume") is not None else "auto" if named else "never"
    return start_of_plan(choose_run_dir(config.run_dir, resume, arguments.config_files), resume)
