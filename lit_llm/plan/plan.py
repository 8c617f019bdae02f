"""The plan of a run: figures of memory, time, cost and checkpoints, for JSON and for a text (`lit_llm.reporting.plan_text`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from lit_llm.core.errors import refuse
from lit_llm.core.hardware import Hardware
from lit_llm.core.memory import COPY_FRACTION
from lit_llm.core.schedule_phases import Phase, phases
from lit_llm.distributed.parallel_layout import FSDP2
from lit_llm.distributed.pipeline_order import bubble
from lit_llm.models.attention_kernel_choice import unsupported_attention
from lit_llm.plan import compute
from lit_llm.plan.budget import budget
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.measured_run import settings_values
from lit_llm.plan.memory import Memory, fits_host, host_bytes, most_memory, peak_memory, resolved, usable_bytes
from lit_llm.plan.optimizer import row_state_bytes, state_bytes
from lit_llm.plan.planned_run import CHECKPOINTING, PlannedRun
from lit_llm.plan.speed import Options, Times, band, fitted_seconds, step_times
from lit_llm.plan.weights import OwnModel, Weights, average_bytes, parameters, stored_bytes, weights_of

DEVICE_MTBF_HOURS = 50_000.0
"""Device-hours between failures: 419 unexpected failures in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783, 3.3.4)."""


class NextStep(NamedTuple):
    """Record of a flag of `fit` that saves `saves_bytes` bytes of a rank's memory. Only the flag `cpu_offload` sets the other
    fields: the bytes of host memory that a machine needs instead, and the seconds of a step with the flag (None: unknown)."""

    flag: str
    saves_bytes: int
    host_bytes: int = 0
    step_seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """Record of all figures of a plan, in bytes and seconds unless the name says otherwise. None: the figure is unknown.

    Attributes:
        settings: the run, with every setting auto of FSDP2 replaced by a decision (`memory.resolved`).
        fits: whether the run fits into the memory of the devices and, with `cpu_offload`, into host memory.
        largest_micro_batch: the most sequences of a micro-batch with which the run fits; 0 if it fits with none.
        next_steps: flags that save memory, the one that costs least time first.
        peak_tflops: dense peak of the run's matrix products on a device, in TFLOP/s.
        parts: {part of the model: number of parameters}.
        phases: the phases of the learning-rate schedule, such as warmup and decay.
    """

    settings: PlannedRun
    hardware: Hardware
    options: Options
    memory: Memory
    fits: bool | None
    largest_micro_batch: int | None
    next_steps: list[NextStep]
    times: Times
    flops: compute.FlopsPerToken
    peak_tflops: float | None
    parts: dict[str, int] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute a token: all parameters, without the experts that the token does not use."""
        model = self.settings.model
        return self.parameters - (0 if isinstance(model, OwnModel) else model.idle_parameters)

    @property
    def tokens_per_second(self) -> float | None:
        return self.settings.tokens_per_step / self.times.step if self.times.step else None

    @property
    def run_seconds(self) -> float | None:
        """Training time without validation and saving. A batch ramp is assumed to run at the speed of its final batch."""
        settings, step = self.settings, self.times.step
        return None if step is None else step * settings.tokens / settings.tokens_per_step

    @property
    def band(self) -> tuple[float, float] | None:
        """(least, most) time of a step, each divided by the planned time. None: the speed was not fitted (`speed.band`)."""
        return band(self.settings, self.hardware, self.times, self.options)

    @property
    def most_memory(self) -> int | None:
        """The most bytes that a rank may need. None: a CPU, or activations are not counted (`memory.most_memory`)."""
        return most_memory(self.settings, self.memory)

    @property
    def device_hours(self) -> float | None:
        return None if self.run_seconds is None else self.run_seconds * self.settings.layout.devices / 3600

    @property
    def usd(self) -> tuple[float, float] | None:
        """(lowest, highest) price of the run in USD. None: the price or the time is unknown."""
        prices = self.hardware.usd_hour(self.options.price_usd_hour)
        if prices is None or self.run_seconds is None:
            return None
        return compute.cost_usd(self.run_seconds, self.settings.layout.devices, prices)

    @property
    def mwh(self) -> float | None:
        """Energy of the devices in MWh during the run, at their rated power. None: the power or the time is unknown."""
        return self.device_hours and self.hardware.watts and self.device_hours * self.hardware.watts / 1e6

    @property
    def budget(self) -> dict[str, Any] | None:
        """The dict of `budget.budget` for the budget in `Options.flops` or `.days`, at this run's speed. None: no budget."""
        speed = None if self.tokens_per_second is None else self.flops.total * self.tokens_per_second
        run = self.active_parameters, self.settings.tokens, speed
        return budget(self.options, self.hardware, self.settings.layout.devices, run)

    @property
    def rates_at(self) -> dict[str, float] | None:
        """{logged curve, such as lr: learning rate at step `Options.at`}. None: no step is set, or no rate is known."""
        at, rates = self.options.at, self.settings.schedule.rates
        return None if at is None or rates is None else rates(at)

    @property
    def mfu(self) -> float | None:
        """Planned MFU: useful FLOP/s of a step divided by the dense peak of all devices, like the logged `throughput/mfu`."""
        if self.times.step is None or self.peak_tflops is None:
            return None
        flops = self.flops.total * self.settings.tokens_per_step
        return flops / (self.times.step * self.settings.layout.devices * self.peak_tflops * 1e12)

    @property
    def mfu_origin(self) -> str:
        """The origin of the planned MFU: "given" (`Options.mfu`), "fitted to published runs" or "assumed"."""
        if self.options.mfu is not None:
            return "given"
        return "assumed" if fitted_seconds(self.settings, self.hardware) is None else "fitted to published runs"

    @property
    def measured(self) -> str | None:
        """A sentence about `Options.measured`, the speed that may correct this plan. None: no measured speed is given."""
        return None if self.options.measured is None else self.options.measured.sentence(self.hardware)

    @property
    def flops_convention(self) -> str:
        return compute.CUSTOM_CONVENTION if isinstance(self.settings.model, OwnModel) else compute.CONVENTION

    @property
    def flops_per_run(self) -> float:
        return self.flops.total * self.settings.tokens

    @property
    def epochs(self) -> float | None:
        """Number of passes over the data. None: unknown, or the data are a mixture, whose passes are in `DataFacts.phases`."""
        data = self.settings.data
        if not data.train_tokens or data.phases:
            return None
        return self.settings.tokens / (data.sequences * self.settings.sequence_length if data.sequences else data.train_tokens)

    @property
    def chinchilla_multiple(self) -> float:
        """Tokens of the run divided by the compute-optimal number of tokens for its parameters."""
        return self.settings.tokens / (compute.TOKENS_PER_PARAMETER * self.active_parameters)

    @property
    def chinchilla_loss(self) -> float | None:
        """The Chinchilla estimate of the final loss in nats per token."""
        return compute.chinchilla_loss(self.active_parameters, self.settings.tokens) if self.settings.tokens else None

    @property
    def pipeline_bubble(self) -> float:
        """Fraction of a step in which a pipeline rank waits for other stages. 0 without a pipeline."""
        return bubble(self.settings.layout.pipeline, self.settings.accumulation)

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: seconds of computation over seconds of a step. None: either is unknown."""
        return self.times.compute / self.times.step if self.times.compute and self.times.step else None

    @property
    def capacity_bytes(self) -> float | None:
        return None if self.hardware.memory_gb is None else self.hardware.memory_gb * 1e9

    @property
    def _weights(self) -> Weights:
        return weights_of(self.settings.model, self.settings.lora)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that get gradients."""
        return sum(weight.total for weight in self._weights if weight.group is not None)

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimizer state of all ranks, as a checkpoint stores it."""
        arguments = self.settings.optimizer, self._weights, self.settings.weight_bytes
        return state_bytes(*arguments) + row_state_bytes(*arguments)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: trained weights (with LoRA, only the adapters), their average and the optimizer state."""
        average = average_bytes(self._weights) if self.settings.ema else 0
        return int(stored_bytes(self._weights, self.settings.weight_bytes, trainable=True) + average + self.state_bytes)

    @property
    def writers(self) -> tuple[int, int, int]:
        """(ranks that write a checkpoint, the most writing ranks on one machine, machines with a writing rank), as numbers.

        The ranks of the first replica write a sharded checkpoint. Rank 0 writes any other checkpoint.
        """
        layout, sharded = self.settings.layout, self.settings.sharded_checkpoints
        if not (layout.splits_model if sharded == "auto" else sharded and layout.is_mesh):
            return 1, 1, 1
        stage = layout.devices // layout.pipeline.ranks
        firsts = (range(first, first + stage // layout.replicate) for first in range(0, layout.devices, stage))
        machines = Counter(rank // self.hardware.devices_per_node for ranks in firsts for rank in ranks)
        return machines.total(), max(machines.values()), len(machines)

    @property
    def faster_micro_batch(self) -> tuple[int, float] | None:
        """(most sequences of a micro-batch that fits, seconds of a step with it); None if it is not 1 % faster than planned."""
        largest, step = self.largest_micro_batch, self.times.step
        if not largest or step is None or largest <= (self.settings.micro_batch_size or 0):
            return None
        seconds = step_times(replace(self.settings, micro_batch_size=largest), self.hardware, self.options).step
        return None if seconds is None or seconds > 0.99 * step else (largest, seconds)

    @property
    def copy_bytes(self) -> int:
        """Bytes of host memory on a machine for copies of a checkpoint that is saved in the background; 0 without copies."""
        (ranks, on_machine, _), saves, has = self.writers, self.settings.async_checkpoints, self.hardware.host["memory_gb"]
        needed = self.checkpoint_bytes * on_machine // ranks
        if saves == "auto":  # as `AsyncFolderCheckpointIO` decides
            fits = has is None or needed <= COPY_FRACTION * (has * 1e9 - self.host_bytes)
            saves = self.settings.layout.splits_model and fits
        return needed if saves else 0

    @property
    def save_seconds(self) -> float:
        """Seconds of writing a checkpoint, by the machine with most writing ranks or, if that is slower, the shared storage."""
        ranks, on_machine, _ = self.writers
        gbps = min(self.options.save_gbps * ranks / on_machine, self.options.storage_gbps or math.inf)
        return self.checkpoint_bytes / (gbps * 1e9)

    @property
    def wait_seconds(self) -> float:
        """Seconds for which training waits for a save: until the checkpoint is written, or with saves in the background, until
        all writing ranks, at the same time, have copied their shards to host memory.

        If the speed of copies is unknown, the result is `save_seconds`, an upper bound.
        """
        if not self.copy_bytes:
            return self.save_seconds
        gbps = self.hardware.host["copy_gbps"]
        return self.save_seconds if gbps is None else self.checkpoint_bytes / self.writers[0] / (gbps * 1e9)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory on a machine that `cpu_offload` takes."""
        return host_bytes(self.settings, self.hardware)

    @property
    def mtbf_seconds(self) -> float:
        """Mean seconds between failures of the run, which stops when any device fails."""
        return 3600 * (self.options.mtbf_hours or DEVICE_MTBF_HOURS / self.settings.layout.devices)

    @property
    def best_interval_seconds(self) -> float:
        """Best seconds between checkpoints: √(2 · `wait_seconds` · MTBF) (Young 1974), but no less than a background save."""
        best = math.sqrt(2 * self.wait_seconds * self.mtbf_seconds)
        return max(best, self.save_seconds) if self.copy_bytes else best

    def lost(self, interval_seconds: float) -> float:
        """Return the lost fraction of time: `wait_seconds` / interval for saves, plus interval / (2 · MTBF) for repeated steps.

        After a failure during a background save, the run resumes from the previous checkpoint: `save_seconds` / MTBF more. If a
        background save takes longer than the interval, the next save waits for its end.
        """
        writing = self.save_seconds if self.copy_bytes else 0.0
        waiting = self.wait_seconds + max(0.0, writing - interval_seconds)
        return waiting / interval_seconds + (max(interval_seconds, writing) / 2 + writing) / self.mtbf_seconds

    @property
    def lost_fraction(self) -> float:
        return self.lost(self.best_interval_seconds)

    @property
    def validation_seconds(self) -> float | None:
        """Seconds of one pass over the validation tokens. Validation runs only forward: a third of the FLOPs of training."""
        tokens, per_step = self.settings.data.val_tokens, self.times.compute
        if tokens is None or per_step is None:
            return None
        return per_step / 3 * tokens / self.settings.tokens_per_step

    @property
    def validations(self) -> int:
        every = self.settings.validation_every_n_steps
        return -(-self.settings.max_steps // every) if every else 0


def make_plan(settings: PlannedRun, hardware: Hardware, options: Options | None = None) -> Plan:
    """Return the plan of the run `settings` on `hardware`. `options` None: the defaults of `Options`.

    A plan traces the model, which takes tenths of a second for each new combination of settings that a trace depends on.

    Raises:
        UserError: the ranks cannot share the model or the batch, the hardware lacks the attention kernel, or `options.at` is
            after the last step; one sentence per line.
    """
    options = options or Options()
    problems = settings.problems()
    if not isinstance(settings.model, OwnModel):  # rules that do not depend on the packages of the planned machine
        kernel, device, of = settings.compute.attention, "cuda" if hardware.is_gpu else "cpu", hardware.compute_capability
        problems += filter(None, [unsupported_attention(settings.model, kernel, device, capability=of, name=hardware.name)])
    if options.at is not None and options.at > settings.max_steps:
        problems.append(f"step {options.at:,} is after the run's last step {settings.max_steps:,} (--at)")
    refuse(problems)
    asked, settings = settings, resolved(settings, hardware)
    capacity = None if hardware.memory_gb is None else usable_bytes(hardware)
    memory = peak_memory(settings, cuda=hardware.is_gpu)
    fits = None if capacity is None else memory.needed <= capacity and fits_host(settings, hardware)
    if fits and not memory.is_known:
        fits = None
    schedule = settings.schedule
    return Plan(
        settings,
        hardware,
        options,
        memory,
        fits,
        largest_micro_batch(settings, hardware, capacity) if capacity is not None and memory.is_known else None,
        next_steps(asked, hardware, memory, capacity, options) if memory.is_known else [],
        step_times(settings, hardware, options),
        compute.flops_per_token(settings.model, settings.lora, settings.block_size),
        settings.dense_peak(hardware),
        parameters(settings.model, settings.lora),
        [] if schedule.rate is None else phases(schedule.rate, settings.max_steps, settings.tokens_before),
    )


def largest_micro_batch(settings: PlannedRun, hardware: Hardware, capacity_bytes: float) -> int:
    """Return the most sequences of a micro-batch that fits the capacity and divides a rank's share of all batches, or 0."""
    share = math.gcd(*(size for _, size in settings.stages)) // settings.layout.data_parallel
    divisors = (size for size in range(1, share + 1) if share % size == 0)
    sizes = [n for n in divisors if replace(settings, micro_batch_size=n).micro_batches.keys() == {n}]  # also in a pipeline

    def is_too_large(size: int) -> bool:
        return peak_memory(replace(settings, micro_batch_size=size), cuda=hardware.is_gpu).needed > capacity_bytes

    fitting = bisect_left(sizes, True, key=is_too_large)  # memory grows with the micro-batch
    return sizes[fitting - 1] if fitting else 0


def next_steps(
    settings: PlannedRun, hardware: Hardware, memory: Memory, capacity_bytes: float | None, options: Options
) -> list[NextStep]:
    """Return flags that save memory, the flag that costs least time first.

    If the run does not fit, the list ends with the first flag that makes the run fit. Flags for another mesh are listed only if
    they make the run fit. `memory`: the peak memory with `settings`. `capacity_bytes`: usable bytes of a device, or None.
    """
    layout, tried = settings.layout, dict[str, PlannedRun]()

    chunk = 8192 if settings.sequences * settings.sequence_length > 8192 else 1024
    if settings.loss.chunk_size is None and settings.model.padded_vocab_size >= 8192:
        tried[f"--loss.chunk_size {chunk}"] = settings.changed("loss", chunk_size=chunk)
    if settings.precision == "32-true":
        narrow = "16-mixed" if hardware.is_before_ampere else "bf16-mixed"
        tried[f"--trainer.precision {narrow}"] = replace(settings, precision=narrow)
    if layout.bucket_copies:
        view = "trainer.strategy gradient_as_bucket_view (recipes/strategy/ddp.yaml)"
        tried[view] = settings.changed("layout", bucket_copies=False)
    if layout.shards != "parameters" and layout.replicate > 1:
        tried[FSDP2] = replace(settings, layout=layout.sharded())
    if layout.shards == "parameters":
        kept, flag = resolved(settings, hardware).layout.kept, "--trainer.strategy.{} true"
        if kept.weights:
            tried[flag.format("reshard_after_forward")] = settings.changed("layout", kept=kept._replace(weights=False), auto=())
        if kept.gradients and layout.pipeline.ranks == 1:
            reduced = kept._replace(gradients=False)
            tried[flag.format("reduce_each_micro_batch")] = settings.changed("layout", kept=reduced, auto=())
    half = replace(settings, micro_batch_size=max(1, settings.sequences // 2))
    if 0 not in half.micro_batches:
        tried[f"--data.micro_batch_size {half.sequences}"] = half
    order: tuple[str | int, ...] = CHECKPOINTING
    if (now := settings.compute.activation_checkpointing) in order:
        for mode in order[order.index(now) + 1 :]:
            tried[f"--compute.activation_checkpointing {mode}"] = settings.changed("compute", activation_checkpointing=mode)
    if layout.is_mesh and not layout.cpu_offload and hardware.is_gpu:
        tried["--trainer.strategy.cpu_offload true"] = settings.changed("layout", cpu_offload=True)
    steps, is_too_large = [], capacity_bytes is not None and memory.needed > capacity_bytes
    meshes = layout.smaller_meshes(hardware.devices_per_node) if is_too_large else ()
    for flag, changed in (tried | {flag: replace(settings, layout=mesh) for flag, mesh in meshes}).items():
        if changed.problems():
            continue
        changed = resolved(changed, hardware)
        needed = peak_memory(changed, cuda=hardware.is_gpu).needed
        on_host = 0 if layout.cpu_offload else host_bytes(changed, hardware)
        fits = capacity_bytes is not None and needed <= capacity_bytes and fits_host(changed, hardware)
        if needed < memory.needed * 0.99 and (fits or flag in tried):
            seconds = step_times(changed, hardware, options).step if on_host else None
            steps.append(NextStep(flag, memory.needed - needed, on_host, seconds))
            if is_too_large and fits:
                break
    return steps


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return all figures of a plan as a dict for JSON, under the names of the attributes of `Plan` and of its fields."""
    settings, layout, memory = plan.settings, plan.settings.layout, plan.memory
    values = settings_values(settings)
    counted = ("sequences", "accumulation", "sequence_length", "tokens_per_step", "tokens", "sizes")
    figures = [name for name, value in vars(Plan).items() if isinstance(value, property) and not name.startswith("_")]
    return {
        **{name: getattr(plan, name) for name in ("parts", "fits", "largest_micro_batch", "peak_tflops", *figures)},
        "next_steps": [step._asdict() for step in plan.next_steps],
        "phases": [asdict(phase) for phase in plan.phases],
        "settings": {
            **values,
            **{name: getattr(settings, name) for name in counted},
            "data": asdict(settings.data),
            "layout": values["layout"]
            | {"devices": layout.devices, "shards": layout.shards, "pipeline": layout.pipeline._asdict()},
        },
        "hardware": plan.hardware.name,
        "memory": {
            name: getattr(memory, name) for name in ("parts", "total", "needed", "reserved", "moment", "is_known", "notes")
        },
        "flops_per_token": asdict(plan.flops) | {"total": plan.flops.total},
        "times": asdict(plan.times) | {"limit": plan.times.limit},
        "communication": communicated_bytes(settings, cuda=plan.hardware.is_gpu),
    }
