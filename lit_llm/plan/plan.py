"""The plan of a run: all figures as numbers. `report` prints them and `json_output` exports them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from lit_llm.errors import UserError
from lit_llm.plan import checkpoints, communication, compute
from lit_llm.plan.activations import Step, micro_batch
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.memory import BYTES, RESERVED_GB, Memory, memory_per_rank
from lit_llm.plan.optimizer import state_bytes
from lit_llm.plan.parameters import local_parameters, parameters, total_parameters
from lit_llm.plan.schedule import Phase, phases
from lit_llm.plan.settings import RunSettings

ASSUMED_MFU = 0.4
"""MFU where none was measured. Well-tuned runs of such models on A100 and H100 publish 36 to 50 %."""
SAVE_GBPS = 0.65
"""Speed of writing a checkpoint, GB/s: 1.2 GB in 1.83 s on one H200 (docs/measurements.md)."""
DEVICE_MTBF_HOURS = 50_000.0
"""Device-hours between failures: 419 unexpected ones in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783, section 3.3.4)."""
DISK_GBPS = 1.0
"""Speed of reading tokens, GB/s. An assumption."""
WRITES_AND_READS = 3.0
"""Memory traffic per byte that an operation writes: it is written once and read about twice."""


@dataclass(frozen=True)
class Options:
    """Assumptions of a plan that are not settings of the run.

    Attributes:
        mfu: useful FLOP/s over the dense peak. None: ASSUMED_MFU.
        mfu_origin: where `mfu` comes from ("given", "calibrated" …); printed next to it.
        price_usd_hour: price per device-hour. None: the range in the hardware table.
        mtbf_hours: mean time between failures of the whole run. None: DEVICE_MTBF_HOURS / devices.
        save_gbps: speed of writing checkpoints.
        pipeline_stages: number of pipeline stages, for the bubble.
        slowest_rank: step time of the slowest rank over the mean.
        served_tokens: tokens the trained model will generate, for the lifetime FLOPs.
    """

    mfu: float | None = None
    mfu_origin: str = "assumed"
    price_usd_hour: float | None = None
    mtbf_hours: float | None = None
    save_gbps: float = SAVE_GBPS
    pipeline_stages: int = 1
    slowest_rank: float = 1.0
    served_tokens: float | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step on one rank. None where the figures of the hardware are unknown.

    Attributes:
        compute: FLOPs at the MFU, including recomputation.
        memory: memory traffic at full bandwidth.
        communication: all communication, overlapped or not.
        exposed: communication that does not overlap with computation.
        data: reading the tokens.
        step: compute plus exposed communication, lengthened by the pipeline bubble and the slowest rank.
        recomputation: executed FLOPs over those without activation checkpointing.
    """

    compute: float | None
    memory: float | None
    communication: float | None
    exposed: float
    data: float
    step: float | None
    recomputation: float = 1.0

    @property
    def limit(self) -> str | None:
        """The longest of compute, memory, communication and data."""
        known = {name: getattr(self, name) for name in ("compute", "memory", "communication", "data")}
        known = {name: seconds for name, seconds in known.items() if seconds is not None}
        return max(known, key=lambda name: known[name]) if self.compute is not None else None


@dataclass(frozen=True)
class Plan:
    """All figures of a plan. Units are bytes and seconds unless the name says otherwise."""

    settings: RunSettings
    hardware: Hardware
    options: Options
    memory: Memory
    fits: bool | None
    largest_micro_batch: int | None
    next_steps: list[tuple[str, int]]
    times: Times
    flops: compute.FlopsPerToken
    peak_tflops: float | None
    parts: dict[str, int] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def run_seconds(self) -> float | None:
        """Training time without validation and saving. A batch ramp is assumed to run at the speed of its final batch."""
        settings, step = self.settings, self.times.step
        return None if step is None else step * settings.tokens / settings.tokens_per_step

    @property
    def usd(self) -> tuple[float, float] | None:
        """Lowest and highest price of the run."""
        price = self.options.price_usd_hour
        low_high = self.hardware.price_usd_hour if price is None else (price, price)
        if low_high is None or self.run_seconds is None:
            return None
        devices = self.settings.layout.devices
        low, high = (compute.cost_usd(self.run_seconds, devices, usd) for usd in low_high)
        return low, high

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: compute time over step time."""
        return self.times.compute / self.times.step if self.times.compute and self.times.step else None

    @property
    def capacity_bytes(self) -> float | None:
        return None if self.hardware.memory_gb is None else self.hardware.memory_gb * 1e9

    @property
    def checkpoint_bytes(self) -> int:
        weight_bytes = BYTES[self.settings.precision][0]
        state = state_bytes(self.settings.optimizer, self.settings.model, weight_bytes)
        return int(total_parameters(self.settings.model) * weight_bytes + state)

    @property
    def save_seconds(self) -> float:
        return self.checkpoint_bytes / (self.options.save_gbps * 1e9)

    @property
    def mtbf_seconds(self) -> float:
        devices = self.settings.layout.devices
        return 3600 * (self.options.mtbf_hours or checkpoints.cluster_mtbf_hours(DEVICE_MTBF_HOURS, devices))

    @property
    def validation_seconds(self) -> float | None:
        """One pass over the validation tokens. It is forward only, so a third of the FLOPs of training."""
        tokens, per_step = self.settings.data.val_tokens, self.times.compute
        if tokens is None or per_step is None:
            return None
        return per_step / 3 * tokens / self.settings.tokens_per_step

    @property
    def validations(self) -> int:
        every = self.settings.validate_every
        return -(-self.settings.steps // every) if every else 0


def make_plan(settings: RunSettings, hardware: Hardware, options: Options | None = None) -> Plan:
    """Plan a run. Pure arithmetic: takes a few milliseconds.

    Raises:
        UserError: sizes do not divide; one sentence per line.
    """
    options = options or Options()
    if problems := settings.problems():
        raise UserError("\n".join(problems))
    capacity = None if hardware.memory_gb is None else usable_bytes(hardware)
    memory = peak_memory(settings, hardware, options)
    fits = None if capacity is None else memory.total <= capacity
    peak = hardware.peak_for(settings.precision, settings.matmul_precision, float8=settings.float8)
    schedule = settings.schedule
    return Plan(
        settings,
        hardware,
        options,
        memory,
        fits,
        None if capacity is None else largest_micro_batch(settings, hardware, options, capacity),
        next_steps(settings, hardware, options, memory, capacity),
        step_times(settings, hardware, options, peak),
        compute.flops_per_token(settings.model),
        peak,
        parameters(settings.model),
        phases(
            schedule.kind,
            steps=settings.steps,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
            decay_steps=schedule.decay_steps,
            tokens_before=settings.tokens_before,
        ),
    )


def usable_bytes(hardware: Hardware) -> float:
    """Capacity of a device without what a GPU's driver reserves. The capacity must be known."""
    assert hardware.memory_gb is not None
    return (hardware.memory_gb - (RESERVED_GB if hardware.is_gpu else 0)) * 1e9


def peak_memory(settings: RunSettings, hardware: Hardware, options: Options) -> Memory:
    """`memory_per_rank` of these settings."""
    largest = max(size for _, size in settings.stages)  # a ramp may also lead down
    return memory_per_rank(
        settings.model,
        sequences=settings.sequences,
        accumulation=largest // (settings.sequences * settings.layout.data_parallel),
        precision=settings.precision,
        optimizer=settings.optimizer,
        layout=settings.layout,
        chunk_size=settings.chunk_size,
        z_loss=settings.z_loss,
        checkpointing=settings.checkpointing,
        cuda=hardware.is_gpu,
    )


def largest_micro_batch(settings: RunSettings, hardware: Hardware, options: Options, capacity_bytes: float) -> int:
    """The largest micro-batch, in sequences, that fits and divides each rank's share of every batch; 0 if none fits."""
    share = math.gcd(*(size for _, size in settings.stages)) // settings.layout.data_parallel
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    low, high = 0, len(sizes)  # memory grows with the micro-batch: bisect
    while low < high:
        middle = (low + high) // 2
        tried = replace(settings, micro_batch=sizes[middle])
        if peak_memory(tried, hardware, options).total <= capacity_bytes:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else 0


def next_steps(
    settings: RunSettings, hardware: Hardware, options: Options, memory: Memory, capacity_bytes: float | None
) -> list[tuple[str, int]]:
    """Flags that save memory and the bytes each saves, cheapest in time first.

    If the run does not fit, the list ends with the first flag that makes it fit.
    """
    layout, tried = settings.layout, []
    chunk = 8192 if settings.sequences * settings.model.block_size > 8192 else 1024
    if settings.chunk_size is None and settings.model.vocab_size >= 8192:
        tried.append((f"--loss.chunk_size {chunk}", replace(settings, chunk_size=chunk)))
    if settings.precision == "32-true":
        tried.append(("--trainer.precision bf16-mixed", replace(settings, precision="bf16-mixed")))
    if layout.bucket_copies:
        view = "trainer.strategy gradient_as_bucket_view (recipes/strategy/ddp.yaml)"
        tried.append((view, replace(settings, layout=replace(layout, bucket_copies=False))))
    if layout.shards != "parameters" and layout.replicate > 1:
        sharded = replace(
            layout, strategy="fsdp2", replicate=1, shard=layout.data_parallel, shards="parameters", bucket_copies=False
        )
        tried.append(("recipes/strategy/fsdp2.yaml", replace(settings, layout=sharded)))
    if settings.sequences > 1:
        half = max(size for size in range(1, settings.sequences) if settings.sequences % size == 0)
        tried.append((f"--data.micro_batch_size {half}", replace(settings, micro_batch=half)))
    order = ("none", "cheap", "attention", "full")
    if settings.checkpointing in order:
        for mode in order[order.index(settings.checkpointing) + 1 :]:
            tried.append((f"--compute.activation_checkpointing {mode}", replace(settings, checkpointing=mode)))
    if layout.shards == "parameters" and not layout.cpu_offload:
        offloaded = replace(layout, cpu_offload=True)
        tried.append(("--trainer.strategy.cpu_offload true", replace(settings, layout=offloaded)))
    found = []
    for flag, changed in tried:
        total = peak_memory(changed, hardware, options).total
        if total < memory.total * 0.99:
            found.append((flag, memory.total - total))
            if capacity_bytes is not None and memory.total > capacity_bytes >= total:
                break
    return found


def step_times(settings: RunSettings, hardware: Hardware, options: Options, peak_tflops: float | None) -> Times:
    """Seconds per step by cause.

    Overlap: DDP communicates during the last backward pass, FSDP during all computation, tensor parallelism during none.
    """
    model, layout = settings.model, settings.layout
    weight_bytes, compute_bytes = BYTES[settings.precision]
    tokens = settings.sequences * model.block_size * settings.accumulation  # of one rank (a tensor-parallel group)
    flops = compute.flops_per_token(model).total * tokens / layout.tensor_parallel
    again = sum(compute.executed_flops_per_token(model, settings.checkpointing)) / sum(compute.executed_flops_per_token(model))
    computing = None
    if peak_tflops is not None:
        computing = compute.seconds_at_mfu(flops, peak_tflops, options.mfu or ASSUMED_MFU) * again
    moving = None
    if hardware.memory_gbps is not None:
        moving = _traffic_bytes(settings, hardware) / (hardware.memory_gbps * 1e9)
    communicating, exposed = _communication(settings, hardware, computing, weight_bytes, compute_bytes)
    reading = tokens * settings.data.bytes_per_token / (DISK_GBPS * 1e9)
    step = None
    if computing is not None:
        bubble = communication.pipeline_bubble(options.pipeline_stages, settings.accumulation)
        step = (computing + exposed) / (1 - bubble) * options.slowest_rank
    return Times(computing, moving, communicating, exposed, reading, step, again)


def _traffic_bytes(settings: RunSettings, hardware: Hardware) -> float:
    """Memory traffic of one rank and step: activations, plus the optimizer's pass over weights and state."""
    model, layout = settings.model, settings.layout
    weight_bytes, compute_bytes = BYTES[settings.precision]
    made = micro_batch(
        Step(
            model,
            settings.sequences,
            weight_bytes,
            compute_bytes,
            settings.chunk_size,
            checkpointing=settings.checkpointing,
            cuda=hardware.is_gpu,
            tensor_parallel=layout.tensor_parallel,
        )
    )
    weights = local_parameters(model, layout.tensor_parallel) * weight_bytes
    state = state_bytes(settings.optimizer, model, weight_bytes) / layout.divisor("optimizer") / layout.tensor_parallel
    # The optimizer reads and writes weights and state and reads gradients; clipping reads and writes gradients.
    return made.written * WRITES_AND_READS * settings.accumulation + 5 * weights / layout.divisor("optimizer") + 2 * state


def _communication(
    settings: RunSettings, hardware: Hardware, computing: float | None, weight_bytes: int, compute_bytes: int
) -> tuple[float | None, float]:
    """(seconds of all communication per step, seconds that do not overlap with computation)."""
    model, layout = settings.model, settings.layout
    if layout.devices == 1:
        return 0.0, 0.0
    if hardware.node_gbps is None or hardware.network_gbps is None:
        return None, 0.0
    links = communication.Links(hardware.node_gbps, hardware.network_gbps, hardware.devices_per_node)
    accumulation, tp = settings.accumulation, layout.tensor_parallel
    weights = local_parameters(model, tp) * weight_bytes
    per_micro_batch = math.inf if computing is None else computing / accumulation
    split, exposed = 0.0, 0.0
    if tp > 1:
        tokens = settings.sequences * model.block_size
        one = communication.all_reduce_seconds(tokens * model.n_embd * compute_bytes, tp, links)
        split = exposed = 4 * model.n_layer * one * accumulation
    shared = 0.0
    if layout.shards == "parameters" and layout.shard > 1:
        gather = communication.gather_seconds(weights, layout.shard, links, stride=tp)
        one = (3 if layout.reshard else 2) * gather  # weights once or twice, gradients once
        shared = one * accumulation
        exposed += communication.exposed_seconds(one, per_micro_batch) * accumulation
    if layout.replicate > 1 or layout.shards in ("optimizer", "gradients"):
        ranks = layout.replicate if layout.shards == "parameters" else layout.data_parallel
        stride = layout.data_parallel // ranks * tp
        reduce = communication.all_reduce_seconds(weights / layout.divisor("parameters"), ranks, links, stride=stride)
        shared += reduce
        exposed += communication.exposed_seconds(reduce, per_micro_batch * 2 / 3)
    return split + shared, exposed


def communicated_bytes(settings: RunSettings) -> dict[str, float]:
    """Bytes each rank sends per optimizer step, by purpose."""
    model, layout = settings.model, settings.layout
    weight_bytes, compute_bytes = BYTES[settings.precision]
    weights = local_parameters(model, layout.tensor_parallel) * weight_bytes
    found: dict[str, float] = {}
    if layout.tensor_parallel > 1:
        tokens = settings.sequences * model.block_size
        one = communication.tensor_parallel_bytes(tokens, model.n_embd, model.n_layer, compute_bytes, layout.tensor_parallel)
        found["tensor parallel"] = one * settings.accumulation
    if layout.shards == "parameters" and layout.shard > 1:
        one = communication.fsdp_bytes(weights, weights, layout.shard, reshard=layout.reshard)
        found["weights gathered, gradients scattered"] = one * settings.accumulation
    if layout.replicate > 1:
        found["gradients all-reduced"] = communication.ddp_bytes(weights / layout.divisor("parameters"), layout.replicate)
    elif layout.shards in ("optimizer", "gradients"):
        found["gradients scattered, weights gathered"] = communication.ddp_bytes(weights, layout.shard)
    return found
