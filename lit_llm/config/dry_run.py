"""`fit --dry_run`: a recipe for a cluster that need not be here, one optimizer step of it as some of its ranks."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from lightning.pytorch.strategies import FSDPStrategy

from lit_llm.config.arguments import Arguments
from lit_llm.config.planned_recipe import PlannedRecipe
from lit_llm.config.trainer import trainer_settings
from lit_llm.core.errors import UserError, report
from lit_llm.core.mesh_sizes import MeshSizes
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.plan.hardware import find
from lit_llm.plan.layout import devices_of
from lit_llm.plan.memory import resolved
from lit_llm.plan.run_settings import RunSettings
from lit_llm.training.dry_run import Batch, Cluster, DryRun, RankRun

_TAKE_PART = ("gradient_norm", "spike_guard", "ema")
"""Callbacks of the recipe that compute, communicate or hold memory in a step."""
_ACCELERATOR = "h100-sxm"
"""Whose memory counts where a setting is auto and depends on it. An assumption."""


@dataclass(frozen=True)
class Rehearsal:
    """What a dry run found.

    Attributes:
        sizes: of the mesh; all 1 without one.
        micro_batches: of an optimizer step on each rank.
        ranks: one for each rank that was run.
        notes: what is assumed, one sentence each.
    """

    cluster: Cluster
    sizes: MeshSizes
    micro_batches: int
    ranks: list[RankRun]
    notes: list[str]


def rehearse(arguments: Arguments, rank: int | None) -> Rehearsal:
    """Run one optimizer step of a recipe as `rank`, or as one rank of each kind.

    Raises:
        UserError: Everything that `fit` would refuse on that cluster, one sentence a line.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a dry run is a single process: start it without torchrun or srun (--dry_run)")
    planned = PlannedRecipe(arguments)
    made = _dry_run(planned)
    world = made.cluster.world
    if rank is not None and rank >= world:
        raise UserError(f"dry_run_rank is {rank}, but the run has {world} processes: 0 to {world - 1} (--dry_run_rank)")
    sizes = made.strategy.sizes(world) if isinstance(made.strategy, MeshStrategy) else MeshSizes()
    ranks = _one_of_each_kind(sizes) if rank is None else [rank]
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    report(f"dry run of {named} of {world} processes: this takes seconds to minutes", kind="note")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = list(threads.map(partial(_in_own_process, arguments), ranks))
    return Rehearsal(made.cluster, sizes, made.batch.micro_batches, runs, [*planned.notes, *_assumed(planned, made, runs)])


def _one_of_each_kind(sizes: MeshSizes) -> list[int]:
    """The first rank of the first, a middle and the last pipeline stage. Ranks of other dimensions do the same."""
    per_stage = sizes.world // sizes.pipeline
    return [stage * per_stage for stage in sorted({0, sizes.pipeline // 2, sizes.pipeline - 1})]


def _in_own_process(arguments: Arguments, rank: int) -> RankRun:
    context = multiprocessing.get_context("forkserver")  # imports once, and forks where no thread exists yet
    context.set_forkserver_preload(["lit_llm.config.dry_run"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(run_rank, arguments, rank).result()
    report(f"rank {rank} has ended after {found.seconds:.1f} s", kind="note")
    return found


def run_rank(arguments: Arguments, rank: int, *, in_full: bool = False) -> RankRun:
    """`DryRun.rank` of a recipe. A process can call it once."""
    return _dry_run(PlannedRecipe(arguments)).rank(rank, in_full=in_full)


def _dry_run(planned: PlannedRecipe) -> DryRun:
    """Raises:
    UserError: a strategy or a model that a dry run cannot follow.
    """
    built, settings = planned.built, planned.settings()
    if built.architecture is not None:
        raise UserError(
            f"a dry run works with lit_llm's GPT only, not with {built.architecture.class_path}: use python -m lit_llm plan "
            "(--dry_run)"
        )
    config = planned.config.trainer
    cluster = Cluster(config.num_nodes or 1, devices_of(config.devices, 1))
    strategy = trainer_settings(built.recipe, without=("logger", "callbacks", "profiler", "plugins"))["strategy"]
    if isinstance(strategy, FSDPStrategy) or strategy in ("fsdp", "fsdp_cpu_offload"):
        strategy = MeshStrategy.from_fsdp1(strategy, cluster.nodes)
    for_accelerator = config.accelerator != "cpu"
    if isinstance(strategy, MeshStrategy):
        layout = resolved(settings, find(_ACCELERATOR)).layout
        if for_accelerator and not layout.auto:  # decided
            strategy.chosen = layout.kept
    elif cluster.world == 1:
        strategy = "auto"
    else:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UserError(
            f"a dry run of several processes needs MeshStrategy, not {name}: use python -m lit_llm plan, or choose another "
            "layout (--config recipes/strategy/fsdp2.yaml)"
        )
    model = built.model
    compute = model.compute_config
    model.compute_config = replace(
        compute, compile=False, float8=False, attention="auto" if for_accelerator else compute.attention
    )
    if built.parts.get("lora") is None:
        model.init_from = None  # weights do not matter
    return DryRun(
        cluster,
        _batch(planned, settings),
        model,
        strategy,
        settings.precision,
        [built.parts[group] for group in _TAKE_PART if group in built.parts],
        {name: config[name] for name in ("gradient_clip_val", "gradient_clip_algorithm")},
        for_accelerator,
    )


def _batch(planned: PlannedRecipe, settings: RunSettings) -> Batch:
    """That of the stage of a ramp with the largest micro-batches."""
    data, model = planned.datamodule, settings.gpt
    sequences, micro_batches = max(settings.micro_batches.items())
    assert model.vocab_size is not None
    return Batch(
        sequences,
        settings.sequence_length,
        micro_batches,
        model.vocab_size,
        tuple(getattr(data, "source_names", ())),
        has_documents=model.mask_documents and model.eos_id is None,
        every_target_counts=getattr(data, "every_target_counts", False),
    )


def _assumed(planned: PlannedRecipe, made: DryRun, runs: list[RankRun]) -> list[str]:
    """What differs from the run itself."""
    compute, found = planned.built.parts["compute"], []
    for name in ("compile", "float8"):
        if getattr(compute, name):
            found.append(f"compute.{name} is off in a dry run: it changes memory, but no collective (--compute.{name})")
    kept = ("reshard_after_forward", "reduce_each_micro_batch")
    automatic = [name for name in kept if getattr(made.strategy, name, None) == "auto"]
    if automatic and made.for_accelerator:
        flags = ", ".join(f"--trainer.strategy.{name}" for name in automatic)
        memory = find(_ACCELERATOR).memory_gb
        found.append(f"what FSDP2 keeps whole is chosen for devices of {memory:g} GB ({flags})")
    found.append("kernels are those of a CPU, and memory inside a kernel is not counted: `plan` has a GPU's kernels")
    for counted in {tuple(run.counted) for run in runs if len(run.counted) > 1}:
        found.append(f"a step is extended from steps of {counted[0]} and {counted[1]} micro-batches")
    return found
