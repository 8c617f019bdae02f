"""Seconds of an optimizer step by cause: computation, memory traffic, communication and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_llm.plan.collectives import exchange_of
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.pipeline_order import bubble
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.speed import CPU, FITTED, UNFITTED_MFU, dense_peak, gpu_of, update_bytes, work_of

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
        mfu: useful FLOP/s over the dense peak while a rank computes, without recomputation. None: see `computing_seconds`.
        price_usd_hour: price per device-hour. None: the range in the hardware table.
        mtbf_hours: mean time between failures of the whole run. None: DEVICE_MTBF_HOURS / devices.
        save_gbps: speed of writing compute.
        slowest_rank: step time of the slowest rank over the mean.
        served_tokens: tokens the trained model will generate, for the lifetime FLOPs.
        measured: the measured speed of a run (`plan --from_run`).
    """

    mfu: float | None = None
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


def computing_seconds(settings: RunSettings, hardware: Hardware, options: Options) -> float | None:
    """Seconds of computation in a step, with recomputation and the optimizer. None: unknown.

    By the given MFU, the speeds fitted to published runs on GPUs, or UNFITTED_MFU. Without a dense peak, only from a measured
    run on the same hardware, by the speeds of a CPU core. A measured run corrects all of these.
    """
    measured, peak, gpu = options.measured, dense_peak(settings, hardware), gpu_of(settings, hardware)
    if measured is not None and not measured.holds_for(hardware):
        measured = None
    if measured is not None and not measured.has_peak:
        seconds = CPU.seconds(work_of(settings, cuda=hardware.is_gpu))
    elif gpu is not None and options.mfu is None and (work := work_of(settings, cuda=True)).body:
        seconds = gpu.seconds(work)
    elif peak is not None:
        flops = _useful_flops(settings) * _recomputation(settings, hardware)
        seconds = flops / (peak * 1e12 * (options.mfu or UNFITTED_MFU))
    else:
        return None
    return seconds if measured is None else seconds * measured.slowness


def _useful_flops(settings: RunSettings) -> float:
    """Of a rank and a step."""
    layout = settings.layout
    tokens = settings.sequences * settings.sequence_length * settings.accumulation  # of the ranks that share samples
    flops = flops_per_token(settings.model, settings.lora, settings.length).total * tokens
    return flops / (layout.tensor_parallel * layout.context * layout.pipeline.ranks)


def _recomputation(settings: RunSettings, hardware: Hardware) -> float:
    """Executed FLOPs over those without activation checkpointing."""
    executed, plain = (
        one_micro_batch(run, cuda=hardware.is_gpu).flops for run in (settings, settings.with_checkpointing("none"))
    )
    return executed / plain if plain else 1.0  # unknown of some users' modules


def step_times(settings: RunSettings, hardware: Hardware, options: Options) -> Times:
    """Seconds per step by cause.

    Overlap: DDP communicates during the last backward pass, FSDP during all computation. A share of that, and of other
    communication, computation waits for (`speed.Constants`).
    """
    computing, micro_batches = computing_seconds(settings, hardware, options), settings.accumulation
    moving = None
    if hardware.memory_gbps is not None:
        written = one_micro_batch(settings, cuda=hardware.is_gpu).written * micro_batches / settings.layout.pipeline.ranks
        moving = (written * WRITES_AND_READS + update_bytes(settings)) / (hardware.memory_gbps * 1e9)
    exchange = exchange_of(settings, hardware)
    tokens = settings.sequences * settings.sequence_length * micro_batches
    reading = tokens * settings.data.bytes_per_token / (DISK_GBPS * 1e9)
    step, exposed = None, 0.0
    if exchange is not None:
        micro_batch_seconds = math.inf if computing is None else computing / micro_batches
        exposed = exchange.exposed(micro_batch_seconds, FITTED.exposed, FITTED.waiting)
    if computing is not None:
        step = (computing + exposed) / (1 - bubble(settings.layout.pipeline, micro_batches)) * options.slowest_rank
    sending, again = None if exchange is None else exchange.total, _recomputation(settings, hardware)
    return Times(computing, moving, sending, exposed, reading, step, again)
