"""Read a recipe for the planner: with the checks of `fit`, for any devices, without a run folder and without data files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lit_llm import callbacks
from lit_llm.callbacks.learning_rate_schedules import rate_curves
from lit_llm.config.arguments import Arguments
from lit_llm.config.build import ONE_DEVICE, build
from lit_llm.config.devices import OtherMachine
from lit_llm.config.objects import RunObjects
from lit_llm.config.resolve import decide, read_spec
from lit_llm.config.run_spec import RunSpec
from lit_llm.core._lightning import set_max_steps
from lit_llm.core.batch_sizes import steps_for
from lit_llm.core.errors import UserError
from lit_llm.optim import optimizer_of
from lit_llm.plan.built_model import build_gpt, build_own
from lit_llm.plan.dataset_size import data_facts, with_packing
from lit_llm.plan.planned_run import PlannedRun, Schedule
from lit_llm.plan.weights import planned_model
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_plan
from lit_llm.runs.run_folder import default_run_dir
from lit_llm.training.auto_precision import Choice

VOCABULARY = 50257
"""GPT-2's vocabulary size, used if neither the recipe nor the data have one."""

# Trainer settings are checked on one CPU, so that the devices of the plan need not be here.
_ONE_CPU = {**ONE_DEVICE, "accelerator": "cpu", "precision": None, "plugins": None}


def build_to_plan(
    arguments: Arguments | list[str],
    *,
    devices: int | None = None,
    devices_per_node: int = 8,
    precision: Choice | None = None,
) -> RunObjects:
    """Check a recipe for the planned devices, and build the recipe's objects on one CPU. Nothing is written.

    Args:
        arguments: the arguments of `fit`.
        devices: number of planned devices. None: trainer.devices times trainer.num_nodes of the recipe.
        devices_per_node: devices in a node of the planned hardware.
        precision: the precision that trainer.precision auto means on the planned hardware. None: as on this machine.

    Raises:
        UserError: `fit` would refuse the recipe for another reason than missing data files; one sentence a line.
    """
    spec = read_spec("fit", arguments)
    machine = OtherMachine(devices, devices_per_node, _start(spec), precision)
    decided = decide(spec, run_dir=default_run_dir(spec.arguments.config_files), machine=machine)
    return build(decided, trainer=_ONE_CPU)


def planned_run(objects: RunObjects) -> tuple[PlannedRun, list[str]]:
    """Return (the run, sentences about assumptions) for the objects that `build_to_plan` returned.

    Raises:
        UserError: The run cannot be planned: the data module has no batch sizes, or the precision is unknown.
    """
    data, config, architecture, layout = objects.datamodule, objects.config, objects.architecture, objects.layout
    optimizer, compute, gpt = objects.optimizer, objects.spec.compute, objects.spec.model
    assert optimizer is not None and compute is not None and gpt is not None and layout is not None
    notes: list[str] = []
    if architecture is not None and (compute.compile or compute.float8):
        notes.append(f"{architecture.class_path} is planned as eager code (--compute.compile, .float8)")
    facts, vocab_size = data_facts(data, missing=bool(objects.missing_data))
    if objects.missing_data:
        facts = replace(facts, origin=f"unknown: {' '.join(objects.missing_data)}")
    if getattr(data, "packing", "concatenate") == "best_fit":
        facts = with_packing(facts, data, missing=bool(objects.missing_data))
        if facts.sequences is None and facts.phases:
            notes.append("epochs of packed sources are estimated without padding, so they will be more")
    if getattr(data, "global_batch_size", None) is None:
        raise UserError(f"{type(data).__name__} has no global_batch_size, so it cannot be planned (--data)")
    vocab_size = gpt.vocab_size or vocab_size
    if vocab_size is None:
        vocab_size = VOCABULARY
        notes.append(f"the vocabulary is unknown, GPT-2's {VOCABULARY:,} is assumed (--model.vocab_size)")
    run = PlannedRun.of(
        objects.parts,
        planned_model(replace(gpt, vocab_size=vocab_size), architecture),
        optimizer,
        layout,
        config.trainer.precision,
        config.trainer.max_steps,
        data=facts,
        async_checkpoints=config.async_checkpoints,
        sharded_checkpoints=config.sharded_checkpoints,
    )
    run = replace(run, max_steps=_last_step(run, config.trainer.max_epochs, notes))
    if run.block_size != run.model.block_size:
        notes.append(
            f"figures are of sequences of data.block_size = {run.block_size} tokens, "
            f"not of model.block_size = {run.model.block_size}"
        )
    if run.ramp:
        notes.append(
            f"batch_ramp: {run.tokens:,} tokens in total. Per-step figures describe the final batch; "
            "total time and cost assume its speed throughout"
        )
    if run.schedule.kind == "Decay":
        notes.append("Decay starts at the resumed checkpoint; the plan assumes that it starts at step 1")
    rate = _rate(objects, run.max_steps)
    return replace(run, schedule=Schedule(run.schedule.kind, lambda step: rate(step, 1.0), _rates(objects, run, rate))), notes


def _last_step(run: PlannedRun, epochs: int | None, notes: list[str]) -> int:
    """Return the step at which `fit` ends: `run.max_steps` or the last step of `epochs` epochs, whichever is first. If the size
    of the data is unknown, return `run.max_steps` and append a sentence to `notes`."""
    steps = run.max_steps
    if steps == -1:
        return steps_of_epochs(run, epochs)
    if epochs in (None, -1):
        return steps
    if not run.data.train_tokens:
        early = f"the run may end before its {steps:,} steps"
        notes.append(f"the size of the dataset is unknown, so {early} (--trainer.max_epochs)")
        return steps
    return min(steps, steps_of_epochs(run, epochs))


def _rates(objects: RunObjects, run: PlannedRun, rate: Callable[[int, float], float]) -> Callable[[int], dict[str, float]]:
    """Return a function from a step to {curve that `fit` logs, such as lr: learning rate}. `rate`: the result of `_rate`."""

    @cache
    def peaks() -> dict[str, float]:
        own = objects.architecture
        model = build_gpt(run.gpt, run.lora) if own is None else build_own(own, run.model.vocab_size)
        groups = optimizer_of(model, objects.model.optimizer_factory).param_groups
        return {name: groups[i]["lr"] for name, i in rate_curves(groups, [group["lr"] for group in groups]).items()}

    return lambda step: {name: rate(step, float(peak)) for name, peak in peaks().items()}


def _rate(objects: RunObjects, steps: int) -> Callable[[int, float], float]:
    """Return a function (step, peak rate) -> learning rate, for a run of `steps` steps."""
    schedule: callbacks.Schedule | None = objects.parts.get("schedule")
    if schedule is None:
        return lambda step, peak: peak
    if isinstance(schedule, callbacks.Decay):
        schedule.load_state_dict({"began": 0, "rates": []})
    set_max_steps(objects.trainer, steps)
    schedule.resolve(objects.trainer)
    return schedule.rate


def steps_of_epochs(run: PlannedRun, epochs: int | None) -> int:
    """Return the number of optimizer steps in `epochs` epochs.

    Raises:
        UserError: the size of the data is unknown, or `epochs` is None or -1 (no limit).
    """
    data = run.data
    if not data.train_tokens or epochs in (None, -1):
        raise UserError("The number of steps depends on the size of the dataset, which is unknown: set --trainer.max_steps.")
    assert epochs is not None
    return steps_for(run.stages, epochs * (data.sequences or (data.train_tokens - 1) // run.sequence_length))


def _start(spec: RunSpec) -> RunStart:
    """Return the checkpoint and step from which the planned run starts, as `--resume` says. Without this flag, a run that
    `--run` or `--run_dir` names starts as with `--resume auto`, and any other run at step 0."""
    config, arguments = spec.config, spec.arguments
    named = arguments.asks_for("run_dir") is not None
    resume = config.resume if arguments.asks_for("resume") is not None else "auto" if named else "never"
    return start_of_plan(choose_run_dir(config.run_dir, resume, arguments.config_files), resume)
