"""Peak memory per rank: weights, optimizer state, and the tensors of a training step at the step's peak. GB = 1e9 bytes.

CUDA's allocator reserves more bytes than tensors take. It has a pool of memory for each stream, and no stream can use the pool
of another. FSDP2 gathers weights on a second stream and reduces gradients on a third. So the buffers of gathers and reductions
take memory all the time, even while no gather runs. So do the sharded gradients, which are views of the reductions' results.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lit_llm.core.hardware import Hardware
from lit_llm.distributed.keep_rule import KeptWhole, keep
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.optimizer import MuonWork, row_state_bytes, state_bytes, work_bytes
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.segments import Step
from lit_llm.plan.weights import (
    OwnModel,
    Weights,
    average_bytes,
    buffer_bytes,
    gathered_bytes,
    gathered_groups,
    is_tied,
    reduced_bytes,
    stored_bytes,
)

CONTEXT_GB = 1.0
"""Assumed GPU memory in GB of the CUDA context and of NCCL, in addition to the memory that torch reserves."""
SLACK = 1.03
"""Ratio of the bytes that CUDA's allocator reserves to the bytes of tensors at the peak: the median of 25 published runs with
both figures. Their ratios are 1.003 to 1.159 (benchmarks/published_memory.py)."""
MOST = 1.25
"""Ratio of the most memory that a GPU may need, with allocator and libraries, to planned memory. Tuned on published runs."""
COMMUNICATOR_GB = 0.5
"""Assumed GB of NCCL's buffers for each dimension of a device mesh, in addition to CONTEXT_GB."""


@dataclass(frozen=True)
class Memory:
    """Record of the peak memory of one rank, in bytes.

    Attributes:
        parts: {kind, such as "weights" or "activations": bytes at the peak}; the bytes add up to `total`.
        moment: name of the phase of the step in which the peak occurs.
        moments: (phase, `parts` at the phase's peak) for each phase of each micro-batch in `steps`, and for the optimizer step.
        steps: the micro-batches of a step that differ in memory, in the order of their execution.
        reserved: bytes that CUDA's allocator takes from the device. None on a CPU.
        notes: sentences about what is unknown or assumed about a custom model.
        is_known: whether activations are counted. False: the model cannot be traced.
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
        """Bytes that the device must have: on a GPU the reserved bytes, on a CPU the bytes of the tensors."""
        return self.total if self.reserved is None else self.reserved


def usable_bytes(hardware: Hardware) -> float:
    """Return the bytes of a device's memory, on a GPU less CONTEXT_GB. The memory of the device must be known."""
    assert hardware.memory_gb is not None
    return (hardware.memory_gb - (CONTEXT_GB if hardware.is_gpu else 0)) * 1e9


def most_memory(settings: PlannedRun, memory: Memory) -> int | None:
    """Return the most bytes that a GPU may need. None: the device is a CPU, or activations are not counted.

    The result is the sum of MOST times the reserved bytes, NCCL's buffers, float8 copies of weights, and with expert
    parallelism the activations once more, because one rank's experts may get more rows than others.
    """
    if memory.reserved is None or not memory.is_known:
        return None
    layout, parts = settings.layout, memory.parts
    dimensions = (layout.replicate, layout.shard, layout.context, layout.tensor_parallel, layout.expert, layout.pipeline.ranks)
    needed = MOST * memory.reserved + COMMUNICATOR_GB * 1e9 * sum(ranks > 1 for ranks in dimensions)
    if settings.compute.float8 and settings.compute.activation_checkpointing != "full":  # two copies for the backward pass
        weights = (weight for rank in range(layout.pipeline.ranks) for weight in settings.weights_of_rank(rank))
        needed += 2 * sum(w.total for w in weights if w.block is not None) / layout.pipeline.ranks
    return round(needed + parts.get("activations", 0) * (layout.expert > 1))


def peak_memory(settings: PlannedRun, *, cuda: bool) -> Memory:
    """Return the peak memory of the rank that needs most memory. `cuda`: whether the run is on GPUs."""
    return max(peaks_of_ranks(settings, cuda=cuda), key=lambda memory: memory.needed)


def host_bytes(settings: PlannedRun, hardware: Hardware) -> int:
    """Return the bytes of host memory on a machine that `cpu_offload` takes: weights, gradients, optimizer state, and temporary
    tensors of the update. 0 without `cpu_offload`."""
    layout, most = settings.layout, 0
    for rank in range(layout.pipeline.ranks if settings.offloads(cuda=hardware.is_gpu) else 0):
        step = Step(settings, settings.sequences, rank=rank)  # cuda=False: a CPU runs the update
        weights = settings.weights_of_rank(rank)
        resident, work = _resident(step, weights)
        gradients = step.own_part(stored_bytes(weights, settings.weight_bytes, trainable=True))
        most = max(most, sum(resident.values()) + gradients + work)
    return most * min(layout.devices, hardware.devices_per_node)


def fits_host(settings: PlannedRun, hardware: Hardware) -> bool:
    """Whether a machine's host memory has room for the tensors that `cpu_offload` keeps there. True if its size is unknown."""
    has = hardware.host["memory_gb"]
    return has is None or host_bytes(settings, hardware) <= has * 1e9


def peaks_of_ranks(settings: PlannedRun, *, cuda: bool) -> list[Memory]:
    """Return the peak memory of each pipeline rank (without a pipeline, of one rank). With a batch ramp, the result is for the
    stage of the ramp that needs most memory."""
    ranks, sizes = range(settings.layout.pipeline.ranks), settings.micro_batches.items()
    memories = ([_memory_of_rank(Step(settings, *size, rank, cuda=cuda)) for rank in ranks] for size in sizes)
    return max(memories, key=lambda ranks: max(rank.needed for rank in ranks))


def _memory_of_rank(step: Step) -> Memory:
    """Return the peak memory of a rank in an optimizer step whose first micro-batch is `step`."""
    settings, layout, weights = step.settings, step.settings.layout, step.settings.weights_of_rank(step.rank)
    gradients = stored_bytes(weights, settings.weight_bytes, trainable=True)
    resident, work = _resident(step, weights)
    if step.offloads:
        resident, work = {name: size for name, size in resident.items() if name == "buffers"}, 0
    moments: list[tuple[str, dict[str, int], int]] = []  # bytes that a phase adds; more on the computing stream
    # DDP copies all gradients into its buckets, or makes them views of these in the last micro-batch of a step.
    is_views = layout.strategy == "ddp" and not layout.bucket_copies
    copied = layout.bucket_copies and layout.data_parallel > 1 and not layout.fsdp2
    bucketed = {"communication buffers": gradients}
    buckets = bucketed if copied or (is_views and step.micro_batches > 1) else {}
    steps = [step]
    if step.pipeline is None:
        later = replace(step, gradients_exist=True)
        if step.micro_batches > 1:
            steps = [step, later]
        elif is_views:  # the gradients are views of the previous step's buckets
            steps = [later]
    for played in map(micro_batch, steps):
        for moment, peak in played.peaks.items():
            # The loss cannot use what blocks freed in the forward pass: its buffers are larger than theirs.
            freed = played.peaks["forward"]["activations"] - peak["activations"] if moment == "loss head" else 0
            moments.append((moment, peak | buckets, max(0, freed) - played.on_other_streams.get(moment, 0)))
    left = {"gradients": step.own_part(gradients), "optimizer work": work}
    moments.append(("optimizer step", left | (bucketed if copied else {}), 0))
    every = tuple((moment, {name: size for name, size in (resident | adds).items() if size}) for moment, adds, _ in moments)
    moment, parts = max(every, key=lambda m: sum(m[1].values()))
    reserved = None
    if step.cuda:
        pools = () if layout.divisor("parameters") == 1 else _pools(weights, layout, settings.sizes)
        reserved = reserved_bytes(sum(resident.values()), [(adds, more) for _, adds, more in moments], *pools)
    return Memory(parts, moment, every, tuple(steps), reserved, played.notes, played.is_known)


def _resident(step: Step, weights: Weights) -> tuple[dict[str, int], int]:
    """Return ({kind of tensor: bytes that stay on the rank during the whole step}, temporary bytes of an optimizer step)."""
    settings, layout, cuda = step.settings, step.settings.layout, step.cuda
    weight_bytes, optimizer = settings.weight_bytes, settings.optimizer
    whole = settings.weights_of_rank(step.rank, whole=True)  # not split by tensor parallelism
    stored = {"weights": stored_bytes(weights, weight_bytes) // layout.divisor("parameters")}
    stored["optimizer state"] = int(state_bytes(optimizer, weights, weight_bytes) / layout.divisor("optimizer"))
    stored["optimizer state"] += row_state_bytes(optimizer, whole, weight_bytes, layout)
    if settings.ema:
        stored["weight average"] = average_bytes(weights) // layout.divisor("parameters")
    work = work_bytes(optimizer, weights, weight_bytes, cuda=cuda) // layout.divisor("parameters")
    if optimizer.is_muon:
        muon = MuonWork.of(whole, layout, normuon=optimizer.normuon)
        work = muon.work_bytes(weight_bytes, optimizer.newton_schulz_bytes(cuda=cuda), cuda=cuda)
    if isinstance(settings.model, OwnModel):
        stored["buffers"] = buffer_bytes(settings.model, weight_bytes)
    return stored, work


def _pools(weights: Weights, layout: Layout, sizes: tuple[int, int]) -> tuple[int, int, int]:
    """Return (`gathers`, `gradients`, `reductions`) in bytes, the arguments of `reserved_bytes` with these names.

    At most, the largest group of weights and the prefetched groups are gathered at a time, and the gradients of one group are
    reduced.
    """
    shards = layout.divisor("parameters")
    *groups, _ = gathered_groups(weights, tied=layout.pipeline.ranks == 1 and is_tied(weights))
    gathered = [sum(gathered_bytes(group, *sizes)) for group in groups]
    gathers = (max(gathered) + layout.prefetch * gathered[0]) * (shards + 1) // shards
    gradients = 0 if layout.cpu_offload else stored_bytes(weights, sizes[0], trainable=True) // shards
    return gathers, gradients, max(map(reduced_bytes, groups))


def reserved_bytes(
    resident: int, moments: list[tuple[dict[str, int], int]], gathers: int = 0, gradients: int = 0, reductions: int = 0
) -> int:
    """Return the bytes that CUDA's allocator reserves: the peak of the computing stream, and the pools of the other streams.

    Args:
        resident: bytes of weights and optimizer state.
        moments: for each phase of the step, ({kind: bytes that the phase adds}, further bytes of the computing stream).
        gathers: the most bytes of gathered weights at a time, on the stream of the gathers.
        gradients: bytes of the rank's shard of the gradients, which are views of the reductions' results.
        reductions: the most bytes of gradients that are reduced at a time, on the stream of the reductions.
    """
    pooled = "gradients" if gradients else ""
    computing = max(sum(n for kind, n in added.items() if kind != pooled) + own for added, own in moments)
    return round(SLACK * (resident + computing + gathers + gradients + reductions))


def resolved(settings: PlannedRun, hardware: Hardware) -> PlannedRun:
    """Return the settings with a decision for each setting in `layout.auto`: whether FSDP2 keeps weights gathered, and whether
    it keeps whole gradients, within a step (`layout.kept`).

    `keep_rule.keep` decides first. On a GPU, FSDP2 keeps less than that if the run does not fit otherwise: gathered weights are
    given up first. If no choice fits, FSDP2 reshards the weights and the gradients that are in `layout.auto`.
    """
    layout = settings.layout
    if not layout.auto or (layout.divisor("parameters") == 1 and not layout.cpu_offload):
        return settings
    memory = (hardware.memory_gb or 0) * 1e9  # unknown: all weights and gradients are resharded
    weights = settings.weights
    kept = keep(
        "auto" if "weights" in layout.auto else not layout.kept.weights,
        "auto" if "gradients" in layout.auto else not layout.kept.gradients,
        pipeline=layout.pipeline.ranks > 1,
        weight_bytes=sum(gathered_bytes(weights, *settings.sizes)),
        gradient_bytes=reduced_bytes(weights),
        memory=memory if hardware.is_gpu else memory / layout.devices,  # ranks of a CPU share its memory
    )
    # Weights and gradients are whole or not; settings other than auto stay. Whole gradients are given up last.
    weights_too, gradients_too = ((whole, whole and name not in layout.auto) for name, whole in kept._asdict().items())
    choices = dict.fromkeys(KeptWhole(first, second) for second in gradients_too for first in weights_too)
    tried = [replace(settings, layout=replace(layout, kept=choice, auto=())) for choice in choices]
    if len(tried) == 1 or not (hardware.is_gpu and memory):
        return tried[0]
    capacity = usable_bytes(hardware)
    return next((each for each in tried if peak_memory(each, cuda=True).needed <= capacity), tried[-1])
