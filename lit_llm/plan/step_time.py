"""Seconds of an optimizer step by cause: computation, memory traffic, communication and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_llm.plan import communication, compute
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import matrix_shapes, state_bytes
from lit_llm.plan.pipeline import bubble
from lit_llm.plan.rank_traffic import (
    bytes_of_rank,
    fullest_stage,
    sequence_bytes,
    stage_bytes,
    tensor_parallel_sizes,
    weights_of_rank,
)
from lit_llm.plan.settings import BYTES, RunSettings
from lit_llm.plan.speed import FITTED, UNFITTED_MFU, gpu_of, work_of
from lit_llm.plan.weights import gathered_bytes, reduced_bytes, stored_bytes

if TYPE_CHECKING:
    from lit_llm.plan.measured_speed import MeasuredSpeed

SAVE_GBPS = 0.65
"""Speed of writing a checkpoint, GB/s: 1.2 GB in 1.83 s on one H200 (docs/evidence/measurements.md)."""
DISK_GBPS = 1.0
"""Speed of reading tokens, GB/s. An assumption."""
WRITES_AND_READS = 3.0
"""Memory traffic per byte that an operation writes: it is written once and read about twice."""


@dataclass(frozen=True)
class Options:
    """Assumptions of a plan that are not settings of the run.

    Attributes:
        mfu: useful FLOP/s over the dense peak while a rank computes, without recomputation. None: `planned_mfu`.
        mfu_origin: where `mfu` comes from ("given", "assumed" …); printed next to it.
        price_usd_hour: price per device-hour. None: the range in the hardware table.
        mtbf_hours: mean time between failures of the whole run. None: DEVICE_MTBF_HOURS / devices.
        save_gbps: speed of writing compute.
        slowest_rank: step time of the slowest rank over the mean.
        served_tokens: tokens the trained model will generate, for the lifetime FLOPs.
        measured: the measured speed of a run (`plan --from_run`).
    """

    mfu: float | None = None
    mfu_origin: str = "given"
    price_usd_hour: float | None = None
    mtbf_hours: float | None = None
    save_gbps: float = SAVE_GBPS
    slowest_rank: float = 1.0
    served_tokens: float | None = None
    measured: MeasuredSpeed | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step on one rank. None where the figures of the hardware are unknown.

    Attributes:
        compute: with recomputation and the optimizer.
        memory: memory traffic at full bandwidth.
        communication: all communication, overlapped or not.
        exposed: communication that computation waits for.
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


def planned_mfu(settings: RunSettings, hardware: Hardware, options: Options) -> float:
    """Useful FLOP/s over the dense peak while a rank computes, without recomputation and communication.

    Of a GPU from speeds fitted to published runs (`speed`), of other hardware UNFITTED_MFU. A measured run corrects it.
    """
    mfu = options.mfu or fitted_mfu(settings, hardware) or UNFITTED_MFU
    return mfu if options.measured is None else options.measured.mfu(mfu, hardware)


def fitted_mfu(settings: RunSettings, hardware: Hardware) -> float | None:
    """The MFU of the speeds fitted to published runs. None: they do not cover this hardware."""
    gpu = gpu_of(settings, hardware)
    if gpu is None or not (work := work_of(settings, cuda=True)).body:
        return None
    return _useful_flops(settings) * _recomputation(settings, hardware) / (gpu.seconds(work) * gpu.peak)


def _useful_flops(settings: RunSettings) -> float:
    """Of a rank and a step."""
    layout = settings.layout
    tokens = settings.sequences * settings.sequence_length * settings.accumulation  # of the ranks that share samples
    flops = compute.flops_per_token(settings.model, settings.lora, settings.length).total * tokens
    return flops / (layout.tensor_parallel * layout.context * layout.pipeline.ranks)


def _recomputation(settings: RunSettings, hardware: Hardware) -> float:
    """Executed FLOPs over those without activation checkpointing."""
    executed, plain = (
        one_micro_batch(run, cuda=hardware.is_gpu).flops for run in (settings, settings.with_checkpointing("none"))
    )
    return executed / plain if plain else 1.0  # unknown of some custom models


def step_times(settings: RunSettings, hardware: Hardware, options: Options, peak_tflops: float | None) -> Times:
    """Seconds per step by cause.

    Overlap: DDP communicates during the last backward pass, FSDP during all computation. A share of that, and of other
    communication, computation waits for (`speed.Constants`).
    """
    layout, again = settings.layout, _recomputation(settings, hardware)
    computing = None if options.measured is None else options.measured.computing(settings, hardware)
    if computing is None and peak_tflops is not None:
        mfu = planned_mfu(settings, hardware, options)
        computing = compute.seconds_at_mfu(_useful_flops(settings), peak_tflops, mfu) * again
    moving = None
    if hardware.memory_gbps is not None:
        moving = _traffic_bytes(settings, hardware) / (hardware.memory_gbps * 1e9)
    exchange = exchange_of(settings, hardware)
    tokens = settings.sequences * settings.sequence_length * settings.accumulation
    reading = tokens * settings.data.bytes_per_token / (DISK_GBPS * 1e9)
    step, exposed = None, 0.0
    if exchange is not None:
        micro_batch_seconds = math.inf if computing is None else computing / settings.accumulation
        exposed = exchange.exposed(micro_batch_seconds, FITTED.exposed, FITTED.waiting)
    if computing is not None:
        step = (computing + exposed) / (1 - bubble(layout.pipeline, settings.accumulation)) * options.slowest_rank
    return Times(computing, moving, None if exchange is None else exchange.total, exposed, reading, step, again)


def _traffic_bytes(settings: RunSettings, hardware: Hardware) -> float:
    """Memory traffic of one rank and step: activations, plus the optimizer's pass over weights and state."""
    layout, tp = settings.layout, settings.layout.tensor_parallel
    weight_bytes, _ = BYTES[settings.precision]
    made = one_micro_batch(settings, cuda=hardware.is_gpu)
    local = fullest_stage(settings, tp)
    weights = stored_bytes(local, weight_bytes, trainable=True)
    state = state_bytes(settings.optimizer, local, weight_bytes) / layout.divisor("optimizer")
    # The optimizer reads and writes weights and state and reads gradients; clipping reads and writes gradients.
    written = made.written / layout.pipeline.ranks
    return written * WRITES_AND_READS * settings.accumulation + 5 * weights / layout.divisor("optimizer") + 2 * state


def exchange_of(settings: RunSettings, hardware: Hardware) -> communication.Exchange | None:
    """The communication of a step; with a pipeline, of the rank that sends most. None: the bandwidth is unknown."""
    layout = settings.layout
    if layout.devices == 1:
        return communication.Exchange()
    if hardware.node_gbps is None or hardware.network_gbps is None:
        return None
    links = communication.Links(hardware.node_gbps, hardware.network_gbps, hardware.devices_per_node)
    weight_bytes, compute_bytes = BYTES[settings.precision]
    accumulation, tp = settings.accumulation, layout.tensor_parallel
    of_pipeline = range(layout.pipeline.ranks)
    rank = max(of_pipeline, key=lambda each: sum(bytes_of_rank(settings, each, cuda=hardware.is_gpu).values()))
    local = weights_of_rank(settings, rank, tp)
    gradients, sharing = stored_bytes(local, weight_bytes, trainable=True), layout.divisor("parameters")
    waiting = 0.0
    if tp > 1:
        sizes = tensor_parallel_sizes(settings, rank)
        waiting = sum(communication.gather_seconds(size, tp, links) for size in sizes) * accumulation
    # Attention waits for what ranks of a sequence exchange. A stage waits for what the stage before sends.
    waiting += sequence_bytes(settings, rank) / (links.node_gbps * 1e9) + stage_bytes(settings, rank) / (
        links.network_gbps * 1e9
    )
    behind = []
    if sharing > 1:
        whole = (*gathered_bytes(local, weight_bytes, compute_bytes), reduced_bytes(local))
        blocks, others, scatter = (communication.gather_seconds(size, sharing, links, stride=tp) for size in whole)
        kept = layout.kept
        each = (0 if kept.weights else 2 * blocks + others) + (0 if kept.gradients else scatter)
        once = (blocks + others if kept.weights else 0) + (scatter if kept.gradients else 0)
        behind = [(each, accumulation, 1.0), (once, 1, 1.0)]
    if layout.replicate > 1 or layout.shards in ("optimizer", "gradients"):
        ranks = layout.replicate if layout.shards == "parameters" else layout.data_parallel
        stride = layout.data_parallel * layout.context // ranks * tp
        reduce = communication.all_reduce_seconds(gradients / layout.divisor("parameters"), ranks, links, stride=stride)
        behind.append((reduce, 1, 2 / 3))
    updates = _muon_seconds(settings, rank, links, cuda=hardware.is_gpu)
    return communication.Exchange(waiting, tuple(behind), updates)


def _muon_seconds(settings: RunSettings, rank: int, links: communication.Links, *, cuda: bool) -> float:
    """Seconds in which Muon's matrices travel to their owners and back, and to the replicas."""
    dimensions, rows = settings.layout.owners
    if not settings.optimizer.is_muon or not dimensions:
        return 0.0
    iterate = settings.optimizer.newton_schulz_bytes(cuda=cuda)
    size = iterate * sum(math.prod(shape) for shape in matrix_shapes(weights_of_rank(settings, rank)))
    seconds, stride = 0.0, 1
    for n in dimensions:
        if n > 1:
            seconds += 2 * communication.exchange_seconds(size / (math.prod(dimensions) * rows), n, links, stride=stride)
        stride *= n
    if rows > 1:
        inside = links.devices_per_node >= stride * rows
        seconds += size / math.prod(dimensions) / ((links.node_gbps if inside else links.network_gbps) * 1e9)
    return seconds
