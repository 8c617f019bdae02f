"""Seconds of an optimizer step: computation, communication, the optimizer in host memory, and the bubble of a pipeline.

Computation on a GPU takes t seconds. The constants narrow, matmul, attention and passes (`Constants`) are fitted to
`benchmarks/published.yaml` (`python benchmarks/published_speed.py --fit`). The width of a matrix is its shorter side:

    t = matrix FLOPs · (1 + narrow / width) / (peak · matmul) + causal attention FLOPs / (peak · attention)
        + bytes written · passes / memory bandwidth + the optimizer's bytes / memory bandwidth

On other devices, the seconds are useful FLOPs · r / (peak · MFU): checkpointed activations raise the executed FLOPs r times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lit_llm.core.errors import UserError
from lit_llm.core.hardware import Hardware
from lit_llm.core.number_text import duration
from lit_llm.distributed.pipeline_order import bubble
from lit_llm.models.config import GPTConfig
from lit_llm.plan.collectives import exchange_of, fullest_stage
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.measured_run import MeasuredRun
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import MuonWork, state_bytes
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.weights import OwnModel, Weights, is_tied, stored_bytes, weights_of

UNFITTED_MFU = 0.4
"""Assumed MFU of devices to which the fitted formula does not apply: CPUs, and GPUs of unknown memory bandwidth."""
LAUNCH_SECONDS = 5e-6
"""Assumed seconds that a CPU takes to launch a GPU kernel."""
SAVE_GBPS = 0.65
"""Speed at which a machine writes a checkpoint, GB/s: 1.2 GB in 1.83 s on one H200 (docs/evidence/measurements.md)."""


@dataclass(frozen=True)
class Work:
    """Record of the work of one rank in an optimizer step; with a pipeline, the mean over its ranks.

    Attributes:
        body, head: FLOPs of matrix products of the blocks and of the head.
        narrowness, head_narrowness: means of 1 / (shorter side of the matrix) over the elements of blocks' and head's matrices.
        attention: FLOPs of attention that a causal mask does not mask out.
        written: bytes that operations of eager PyTorch write.
        optimizer: bytes of weights, gradients and state that gradient clipping and the update read and write.
        muon: FLOPs of Muon's Newton-Schulz iterations.
        kernels: number of kernel launches. Compiled blocks are assumed to launch a third as many kernels as eager blocks.
    """

    body: float
    narrowness: float
    head: float
    head_narrowness: float
    attention: float
    written: float
    optimizer: float
    muon: float
    kernels: float


def work_of(settings: PlannedRun, *, cuda: bool) -> Work:
    """Return the work of a rank in an optimizer step, from the trace of a micro-batch and the sizes of the weights."""
    layout, model = settings.layout, settings.model
    batch = one_micro_batch(settings, cuda=cuda)
    micro_batches = settings.accumulation / layout.pipeline.ranks
    tokens = settings.sequences * settings.sequence_length / layout.context
    flops = flops_per_token(model, settings.lora, settings.block_size)
    weights = settings.weights
    (in_head, head_narrowness), (_, narrowness) = (_matrices(weights, head=head) for head in (True, False))
    heads = 1 if isinstance(model, OwnModel) else 1 + model.predict_ahead  # logits of a token
    matmul, attention, written, kernels, *_ = batch.counts
    head_flops = min(6.0 * tokens * in_head * heads, matmul)
    by_chunks = layout.context > 1 and layout.context_attention == "gather"  # then kernels compute most masked scores, too
    causal = flops.attention_causal / flops.attention if flops.attention and not by_chunks else 1.0
    iterations = 0.0
    if settings.optimizer.is_muon:
        work = MuonWork.of(weights_of(model, settings.lora), layout)
        iterations = work.flops(settings.optimizer.newton_schulz_bytes(cuda=cuda)) / layout.pipeline.ranks
    return Work(
        (matmul - head_flops) * micro_batches,
        narrowness,
        head_flops * micro_batches,
        head_narrowness,
        attention * micro_batches * causal,
        written * micro_batches,
        update_bytes(settings),
        iterations,
        kernels * micro_batches / (3 if _is_compiled(settings) else 1),
    )


def update_bytes(settings: PlannedRun) -> float:
    """Return the bytes that gradient clipping and the optimizer's update read and write on a rank.

    Clipping reads and writes gradients. The update reads gradients, and reads and writes weights and state.
    """
    local, weight_bytes = fullest_stage(settings), settings.weight_bytes
    moved = 5 * stored_bytes(local, weight_bytes, trainable=True) + 2 * state_bytes(settings.optimizer, local, weight_bytes)
    return moved / settings.layout.divisor("optimizer")


def host_seconds(settings: PlannedRun, hardware: Hardware) -> float | None:
    """Return the seconds of a step in which CPUs accumulate gradients, clip gradients and update weights under `cpu_offload`.

    The ranks of a machine share its memory's bandwidth. Muon's iterations are not counted. 0.0 without `cpu_offload`. None: the
    speed of the host's memory or of copies to it is unknown, so the time of a step is unknown, too.
    """
    if not settings.offloads(cuda=hardware.is_gpu):
        return 0.0
    layout, gbps = settings.layout, hardware.host["memory_gbps"]
    if gbps is None or hardware.host["copy_gbps"] is None:
        return None
    gradients = stored_bytes(fullest_stage(settings), settings.weight_bytes, trainable=True) / layout.divisor("gradients")
    additions = 0 if layout.kept.gradients else settings.accumulation - 1  # each reads two numbers and writes one
    moved = update_bytes(settings) + 3 * additions * gradients
    return moved * min(layout.devices, hardware.devices_per_node) / (gbps * 1e9)


def _is_compiled(settings: PlannedRun) -> bool:
    return settings.compute.compile and not isinstance(settings.model, OwnModel)


def _matrices(weights: Weights, *, head: bool) -> tuple[float, float]:
    """Return (number of elements, mean of 1 / width over these elements) of matrices. `head`: of the head's matrix only, which
    may be a tied embedding; otherwise of all matrices but head and embeddings. The width is a matrix's shorter side.
    """
    heads = ("output head", "token embedding") if is_tied(weights) else ("output head",)

    def is_counted(part: str) -> bool:
        return part in heads if head else part != "output head" and "embedding" not in part

    matrices = [weight for weight in weights if len(weight.shape) > 1 and is_counted(weight.part)]
    elements = float(sum(weight.total for weight in matrices))
    return elements, sum(weight.total / min(weight.shape[-2:]) for weight in matrices if weight.total) / max(1.0, elements)


# -- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """Record of fitted constants of the formula for the speed of GPUs (see the module's docstring).

    Attributes:
        matmul, matmul_ampere: fraction of the dense peak that matrix products of infinite width reach, on GPUs from Hopper on
            and on earlier GPUs.
        narrow: width at which matrix products are half as fast as matrix products of infinite width.
        attention, attention_ampere: fraction of the dense peak that FlashAttention-2 reaches, on GPUs from Hopper on and on
            earlier GPUs. FlashAttention-3 and -4 use attention_ampere on every GPU.
        eager, compiled: passes over memory for each byte that an operation of eager PyTorch writes, in an eager and in a
            compiled model.
        float8: factor by which casts to float8 multiply `eager` or `compiled`.
        exposed: the share of FSDP's and DDP's communication that at least does not overlap with computation.
        waiting: the share of other communication for which computation waits.
    """

    matmul: float = 0.713
    matmul_ampere: float = 0.863
    narrow: float = 422.0
    attention: float = 0.214
    attention_ampere: float = 0.382
    eager: float = 2.58
    compiled: float = 0.483
    float8: float = 2.24
    exposed: float = 0.566
    waiting: float = 0.301


FITTED = Constants()

FITTED_DEVICES = ("a100-40gb", "a100-80gb", "h100-sxm", "h100-96gb", "h200")
UNKNOWN = {"kernels": (1.3, 1.35), "float8": (1.15, 1.1), "experts": (1.15, 2.0), "device": (1.15, 1.25)}
"""{source of uncertainty: (factor by which computing may be faster, factor by which it may be slower)}. `band` multiplies the
factors of all sources that a run has. Tuned on published runs (docs/evidence/plan-speed.md). kernels: another program's or
version's kernels; float8: variants of float8; experts: how rows are sent to experts, and how few rows an expert has; device: a
device that is not in FITTED_DEVICES."""


def gpu_seconds(work: Work, settings: PlannedRun, hardware: Hardware, constants: Constants = FITTED) -> float | None:
    """Return the seconds that a GPU takes for `work`. None: peak or memory bandwidth are unknown, or `hardware` is no GPU."""
    tflops, compute = settings.dense_peak(hardware), settings.compute
    if tflops is None or hardware.memory_gbps is None or not hardware.is_gpu:
        return None
    float8 = hardware.peak_tflops["fp8"] if compute.float8 else None  # the blocks' products only
    peak, body_peak, bandwidth = tflops * 1e12, (float8 or tflops) * 1e12, hardware.memory_gbps * 1e9
    is_ampere = hardware.compute_capability is not None and hardware.compute_capability < 9
    matmul = constants.matmul_ampere if is_ampere else constants.matmul
    is_faster = is_ampere or compute.attention in ("flash3", "flash4")
    attention = constants.attention_ampere if is_faster else constants.attention
    passes = constants.compiled if _is_compiled(settings) else constants.eager
    if float8 is not None:
        passes *= constants.float8
    products = work.body / body_peak * (1 + constants.narrow * work.narrowness)
    products += work.head / peak * (1 + constants.narrow * work.head_narrowness)
    attending = work.attention / peak / attention
    kernels = products / matmul + attending + work.written / bandwidth * passes
    updating = 0.0 if settings.layout.cpu_offload else work.optimizer / bandwidth + work.muon / peak
    return max(kernels, work.kernels * LAUNCH_SECONDS) + updating


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Record of the assumptions of a plan that are not settings of the run.

    Attributes:
        mfu: useful FLOP/s over the dense peak while a rank computes, before recomputation. None: fitted or UNFITTED_MFU
            (`computing_seconds`).
        price_usd_hour: price in USD per device-hour. None: the range in the hardware table.
        mtbf_hours: mean hours between failures of the whole run. None: DEVICE_MTBF_HOURS / devices.
        save_gbps: GB/s at which a machine writes a checkpoint.
        storage_gbps: GB/s at which all machines together write a checkpoint. None: each machine writes at `save_gbps`.
        slowest_rank: step time of the slowest rank divided by the mean step time of the ranks.
        served_tokens: tokens that the trained model will generate, for the FLOPs of its lifetime. None: not asked for.
        measured: the measured speed of a run (`plan --from_run`).
        scaling_efficiency: computing time over step time; replaces the planned waiting for communication and a pipeline.
        flops, days: a training budget, in FLOPs or in days of all devices. None: no budget.
        at: the optimizer step whose learning rates the plan shows. None: the plan shows no learning rates.
    """

    mfu: float | None = None
    price_usd_hour: float | None = None
    mtbf_hours: float | None = None
    save_gbps: float = SAVE_GBPS
    storage_gbps: float | None = None
    slowest_rank: float = 1.0
    served_tokens: float | None = None
    measured: MeasuredRun | None = None
    scaling_efficiency: float | None = None
    flops: float | None = None
    days: float | None = None
    at: int | None = None


@dataclass(frozen=True)
class Times:
    """Record of the seconds of one optimizer step on one rank. None: a speed of the hardware is unknown.

    Attributes:
        compute: seconds of computation on the device, with recomputation, memory traffic and the optimizer.
        communication: seconds of all communication, overlapped or not.
        exposed: seconds in which computation waits for communication.
        step: ((compute + exposed) / (1 - pipeline bubble) + host) · `Options.slowest_rank`.
        recomputation: executed FLOPs divided by the FLOPs without activation checkpointing.
        host: seconds of the optimizer on CPUs, with `cpu_offload` (`host_seconds`).
    """

    compute: float | None
    communication: float | None
    exposed: float
    step: float | None
    recomputation: float = 1.0
    host: float = 0.0

    @property
    def limit(self) -> str | None:
        """The field with the most seconds: "compute", "communication" or "host". None: `compute` is unknown."""
        if self.compute is None:
            return None
        causes = {"compute": self.compute, "communication": self.communication or 0.0, "host": self.host}
        return max(causes, key=causes.__getitem__)


def computing_seconds(settings: PlannedRun, hardware: Hardware, options: Options) -> float | None:
    """Return the seconds of computation in a step, with recomputation and the optimizer. None: unknown.

    The seconds follow from `Options.mfu` if it is set; else from the speeds fitted to published runs, if these cover the run;
    else from UNFITTED_MFU. A measured run that holds for `hardware` corrects the seconds; the dense peak may then be unknown.
    """
    measured, peak = options.measured, settings.dense_peak(hardware)
    if measured is not None and not measured.holds_for(hardware):
        measured = None
    if measured is not None and not measured.has_peak:
        peak = 1.0  # any number: the run corrects it
    seconds = None if options.mfu is not None else fitted_seconds(settings, hardware)
    if seconds is None:
        if peak is None:
            return None
        layout, tokens = settings.layout, settings.sequences * settings.sequence_length * settings.accumulation
        flops = flops_per_token(settings.model, settings.lora, settings.block_size).total * tokens
        flops /= layout.tensor_parallel * layout.context * layout.pipeline.ranks  # ranks that share samples
        seconds = flops * _recomputation(settings, hardware) / (peak * 1e12 * (options.mfu or UNFITTED_MFU))
    return seconds if measured is None or seconds is None else seconds * measured.slowness


def fitted_seconds(settings: PlannedRun, hardware: Hardware) -> float | None:
    """Return the seconds of computation in a step by the formula fitted to published runs. None: the formula does not apply,
    because `hardware` is no GPU, its peak or memory bandwidth is unknown, or the model cannot be traced."""
    if not hardware.is_gpu or not (work := work_of(settings, cuda=True)).body:
        return None
    return gpu_seconds(work, settings, hardware)


def band(settings: PlannedRun, hardware: Hardware, times: Times, options: Options) -> tuple[float, float] | None:
    """Return (least, most) time of a step, each divided by the planned time.

    For the least time, computing is faster by the factors in UNKNOWN, and overlaps with all communication. For the most time,
    computing is slower by the factors, and overlaps with no communication. None: the speed is given, measured, or not fitted.
    """
    is_given = options.mfu is not None or options.measured is not None
    if is_given or times.step is None or times.compute is None or fitted_seconds(settings, hardware) is None:
        return None
    is_so = {
        "kernels": True,
        "float8": settings.compute.float8,
        "experts": isinstance(settings.model, GPTConfig) and settings.model.moe is not None,
        "device": hardware.name not in FITTED_DEVICES,
    }
    faster, slower = (math.prod(factor) for factor in zip(*(UNKNOWN[name] for name in UNKNOWN if is_so[name]), strict=True))
    if options.scaling_efficiency is not None:
        return 1 / faster, slower
    planned, most = times.compute + times.exposed, times.compute * slower + (times.communication or 0.0)
    least, planned, most = (seconds + times.host for seconds in (times.compute / faster, planned, most))
    return least / planned, most / planned


def _recomputation(settings: PlannedRun, hardware: Hardware) -> float:
    """Return the executed FLOPs divided by the FLOPs without activation checkpointing."""
    executed, plain = (
        one_micro_batch(run, cuda=hardware.is_gpu).flops
        for run in (settings, settings.changed("compute", activation_checkpointing="none"))
    )
    return executed / plain if plain else 1.0  # 0: a user's module that cannot be traced


def step_times(settings: PlannedRun, hardware: Hardware, options: Options) -> Times:
    """Return the seconds of an optimizer step: of computation, communication and the update on the host, and in total.

    DDP's communication overlaps with the last backward pass, FSDP's with all computation. Computation still waits for the share
    `Constants.exposed` of DDP's and FSDP's communication, and for the share `Constants.waiting` of other communication.
    """
    computing, micro_batches = computing_seconds(settings, hardware, options), settings.accumulation
    exchange = exchange_of(settings, hardware)
    step, exposed, host = None, 0.0, host_seconds(settings, hardware)
    if exchange is not None:
        micro_batch_seconds = math.inf if computing is None else computing / micro_batches
        exposed = exchange.exposed(micro_batch_seconds, FITTED.exposed, FITTED.waiting)
    idle = bubble(settings.layout.pipeline, micro_batches)
    if computing is not None and host is not None:
        if options.scaling_efficiency is not None:
            exposed, idle = computing * (1 / options.scaling_efficiency - 1), 0.0
        step = ((computing + exposed) / (1 - idle) + host) * options.slowest_rank
    sending, again = None if exchange is None else exchange.total, _recomputation(settings, hardware)
    return Times(computing, sending, exposed, step, again, host or 0.0)


def with_slowness(source: MeasuredRun) -> MeasuredRun:
    """Return `source` with the `slowness` for which the planned step of `source`'s settings is as long as the measured step.

    Raises:
        UserError: The planned communication alone takes longer than the measured step, or the FLOPs of a step are unknown.
    """

    def step(slowness: float) -> float:
        options = Options(measured=replace(source, slowness=slowness))
        seconds = step_times(source.settings, source.hardware, options).step
        assert seconds is not None
        return seconds

    fast, slow = 1e-12, 1e12
    if step(fast) > source.step_seconds:
        raise UserError(
            f"{source.run} took {duration(source.step_seconds)} per step, less than the {duration(step(fast))} planned for its "
            "communication alone, so its speed cannot be carried; measure a run on one device (--from_run)"
        )
    if step(slow) < source.step_seconds:
        raise UserError(f"the work of a step of {source.run} is unknown, so its speed cannot be carried (--from_run)")
    for _ in range(64):  # slower computing makes no step shorter
        middle = math.sqrt(slow * fast)
        fast, slow = (fast, middle) if step(middle) > source.step_seconds else (middle, slow)
    return replace(source, slowness=slow)
