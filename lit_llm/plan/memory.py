"""Peak memory per rank: weights and optimizer state, plus what a training step adds at its peak. GB = 1e9 bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from lit_llm.distributed.keep_rule import KeptWhole, keep
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.optimizer import (
    expert_shapes,
    expert_work_bytes,
    matrix_shapes,
    muon_work_bytes,
    row_state_bytes,
    state_bytes,
    work_bytes,
)
from lit_llm.plan.passes import Step
from lit_llm.plan.pipeline_order import StageShare, shares, weights_of_stages
from lit_llm.plan.reserved import CONTEXT_GB, Pools, pools_of, reserved_bytes
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.weights import (
    OwnModel,
    Weight,
    average_bytes,
    buffer_bytes,
    gathered_bytes,
    gradient_bytes,
    reduced_bytes,
    stored_bytes,
    weights_of,
)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank. `parts` add up to `total`; `moment` names the phase of the step in which the peak occurs.

    Attributes:
        moments: `parts` at the peak of each phase of `steps`, and then of the optimizer step.
        steps: micro-batches that differ in memory, in their order.
        reserved: what CUDA's allocator takes from the device for it. None on a CPU.
        notes: what is unknown or assumed of a custom model, one sentence each.
        is_known: False: activations are not counted.
    """

    parts: dict[str, int]
    moment: str
    moments: tuple[tuple[str, dict[str, int]], ...] = ()
    steps: tuple[Step, ...] = field(default=(), compare=False)
    reserved: int | None = None
    notes: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """Bytes that the device must have: on a GPU, those reserved."""
        return self.total if self.reserved is None else self.reserved


def usable_bytes(hardware: Hardware) -> float:
    """Capacity of a device without the context of a GPU's driver. The capacity must be known."""
    assert hardware.memory_gb is not None
    return (hardware.memory_gb - (CONTEXT_GB if hardware.is_gpu else 0)) * 1e9


def peak_memory(settings: RunSettings, *, cuda: bool) -> Memory:
    """Peak memory of the rank that needs most."""
    return max(peaks_of_ranks(settings, cuda=cuda), key=lambda memory: memory.needed)


def peaks_of_ranks(settings: RunSettings, *, cuda: bool) -> list[Memory]:
    """Peak memory of each rank of the pipeline, without one of a rank, in the stage of a batch ramp that needs most."""
    pipeline = settings.layout.pipeline
    ranks = range(pipeline.ranks)
    stages = [shares(pipeline, settings.gpt.n_layer, rank) if len(ranks) > 1 else () for rank in ranks]
    sizes = settings.micro_batches.items()
    found = ([_memory_of_rank(settings, each, *size, cuda=cuda) for each in stages] for size in sizes)
    return max(found, key=lambda ranks: max(rank.needed for rank in ranks))


def _memory_of_rank(
    settings: RunSettings, stages: tuple[StageShare, ...], sequences: int, micro_batches: int, *, cuda: bool
) -> Memory:
    """Peak memory of a rank.

    Args:
        stages: of the pipeline, that the rank has; (): the whole model.
        sequences: per micro-batch and rank.
        micro_batches: per optimizer step.
    """
    layout, weight_bytes, tp = settings.layout, settings.weight_bytes, settings.layout.tensor_parallel
    weights, whole = (weights_of(settings.model, settings.lora, ranks) for ranks in (tp, 1))
    if stages:
        weights, whole = weights_of_stages(weights, stages), weights_of_stages(whole, stages)
    resident = _resident(settings, weights, whole)
    step = Step(settings, sequences, micro_batches, stages, cuda=cuda)
    moments: list[tuple[str, dict[str, int], int]] = []
    # DDP copies all gradients into its buckets, or makes them views of these in the last micro-batch of a step.
    is_views = layout.strategy == "ddp" and not layout.bucket_copies
    copied = layout.bucket_copies and layout.data_parallel > 1 and not layout.fsdp2
    bucketed = {"communication buffers": stored_bytes(weights, weight_bytes, trainable=True)}
    buckets = bucketed if copied or (is_views and micro_batches > 1) else {}
    later = replace(step, gradients_exist=True)
    steps = (step,) if stages or micro_batches == 1 else (step, later)
    if not stages and is_views and micro_batches == 1:  # the buckets of the step before are there, and no other gradients
        steps = (later,)
    for made in map(micro_batch, steps):
        for moment, peak in made.peaks.items():
            unusable = _unusable(made.peaks) if moment == "loss head" else 0
            moments.append((moment, peak | buckets, unusable - made.on_other_streams.get(moment, 0)))
    last = {"gradients": 0, "optimizer work": 0}
    if not layout.cpu_offload:
        gradients = gradient_bytes(weights, weight_bytes, 1 if layout.fsdp2 else tp) // layout.divisor("gradients")
        last = {"gradients": gradients, "optimizer work": _optimizer_work(settings, weights, whole, cuda=cuda)}
    moments.append(("optimizer step", last | (bucketed if copied else {}), 0))
    every = tuple((moment, {name: size for name, size in (resident | adds).items() if size}) for moment, adds, _ in moments)
    moment, parts = max(every, key=lambda m: sum(m[1].values()))
    reserved = None
    if cuda:
        pools = Pools() if layout.divisor("parameters") == 1 else pools_of(weights, layout, settings.sizes)
        reserved = reserved_bytes(sum(resident.values()), [(adds, more) for _, adds, more in moments], pools)
    return Memory(parts, moment, every, steps, reserved, made.notes, made.is_known)


def _resident(settings: RunSettings, weights: tuple[Weight, ...], whole: tuple[Weight, ...]) -> dict[str, int]:
    """Bytes that stay on a rank, by part. `whole`: its weights, not split by tensor parallelism."""
    layout, weight_bytes, optimizer = settings.layout, settings.weight_bytes, settings.optimizer
    found = {}
    if not layout.cpu_offload:
        found["weights"] = stored_bytes(weights, weight_bytes) // layout.divisor("parameters")
        found["optimizer state"] = int(state_bytes(optimizer, weights, weight_bytes) / layout.divisor("optimizer"))
        found["optimizer state"] += row_state_bytes(optimizer, whole, weight_bytes, layout.divisor("optimizer"))
        if settings.ema:
            found["weight average"] = average_bytes(weights) // layout.divisor("parameters")
    if isinstance(settings.model, OwnModel):
        found["buffers"] = buffer_bytes(settings.model, weight_bytes)
    return found


def _optimizer_work(settings: RunSettings, weights: tuple[Weight, ...], whole: tuple[Weight, ...], *, cuda: bool) -> int:
    """Temporary bytes of an optimizer step on a rank."""
    layout, optimizer, weight_bytes = settings.layout, settings.optimizer, settings.weight_bytes
    if not optimizer.is_muon:
        return work_bytes(optimizer, weights, weight_bytes, cuda=cuda) // layout.divisor("parameters")
    dimensions, rows = layout.owners
    iterate, shards = optimizer.newton_schulz_bytes(cuda=cuda), math.prod(dimensions)
    shapes, normuon = matrix_shapes(whole), optimizer.normuon
    return max(
        muon_work_bytes(shapes, weight_bytes, iterate, shards=shards, rows=rows, cuda=cuda, normuon=normuon),
        expert_work_bytes(expert_shapes(whole), weight_bytes, iterate, shards=shards, cuda=cuda),
    )


def _unusable(peaks: dict[str, dict[str, int]]) -> int:
    """What blocks freed in the forward pass, and the loss cannot use: its buffers are larger than theirs."""
    return max(0, peaks["forward"]["activations"] - peaks["loss head"]["activations"])


def resolved(settings: RunSettings, hardware: Hardware) -> RunSettings:
    """The settings, with what FSDP2 keeps whole where that is auto: as `keep` says, on a GPU the fastest that fits.

    If nothing fits, nothing is kept.
    """
    layout = settings.layout
    if not layout.auto or layout.divisor("parameters") == 1:
        return settings
    memory = (hardware.memory_gb or 0) * 1e9  # unknown: nothing is kept
    weights = weights_of(settings.model, settings.lora, layout.tensor_parallel)
    kept = keep(
        "auto" if "weights" in layout.auto else not layout.kept.weights,
        "auto" if "gradients" in layout.auto else not layout.kept.gradients,
        pipeline=layout.pipeline.ranks > 1,
        weight_bytes=sum(gathered_bytes(weights, *settings.sizes)),
        gradient_bytes=reduced_bytes(weights),
        memory=memory if hardware.is_gpu else memory / layout.devices,  # ranks of a CPU share its memory
    )
    choices = dict.fromkeys(
        KeptWhole(
            kept.weights and (weights_too or "weights" not in layout.auto),
            kept.gradients and (gradients_too or "gradients" not in layout.auto),
        )
        for weights_too, gradients_too in ((True, True), (False, True), (True, False), (False, False))
    )
    tried = [replace(settings, layout=replace(layout, kept=choice, auto=())) for choice in choices]
    if len(tried) == 1 or not (hardware.is_gpu and memory):
        return tried[0]
    capacity = usable_bytes(hardware)
    return next((each for each in tried if peak_memory(each, cuda=True).needed <= capacity), tried[-1])
