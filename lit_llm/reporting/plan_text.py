"""The text of a plan for a terminal, or in Markdown. For JSON, see `lit_llm.plan.as_dict`.

Estimates have two significant digits; counts have all digits.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_llm.core.batch_sizes import steps_for
from lit_llm.core.number_text import count, counted, duration, money_range, percent, size, two_digits
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.memory import CONTEXT_GB, usable_bytes
from lit_llm.plan.plan import NextStep, Plan
from lit_llm.plan.sweep import Variant
from lit_llm.plan.weights import OwnModel

if TYPE_CHECKING:
    from rich.text import Text

    from lit_llm.data.mixture_order import PhaseDraws


_BARS = "▁▂▃▄▅▆▇█"
_MIXTURE = ("phase", "source", "share", "tokens", "epochs by its end", "max_epochs")
_MANY_EPOCHS = 4
_REPEATED = f": beyond about {_MANY_EPOCHS}, repeated data help less (Muennighoff et al. 2023)"


@dataclass(frozen=True)
class Section:
    """Record of a heading and rows of a plan's text. `header`: names of the rows' columns; (): rows are (label, text)."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()


def sections(plan: Plan | dict[str, Any]) -> list[Section]:
    """Return the sections of the text about a plan, or about a compute budget (the dict of `plan.budget.budget`)."""
    if isinstance(plan, dict):
        return _budget(plan)
    all_sections = [
        Section("", summary(plan)),
        Section("Model", _model(plan)),
        Section("Run", _run(plan)),
        Section("Mixture", _mixture(plan), _MIXTURE),
        Section(f"Memory per rank, peak ({plan.memory.moment})", _memory(plan)),
        Section("Compute and time", _time(plan)),
        Section("Communication", _communication(plan)),
        Section("Checkpoints and validation", _upkeep(plan)),
        *([] if plan.budget is None else _budget(plan.budget)),
    ]
    return [section for section in all_sections if section.rows]


def render(plan: Plan | dict[str, Any], *, width: int = 80) -> Text:
    """Return the text of a plan or budget for rich's console, in lines of at most `width` characters (tables may be wider)."""
    from rich.text import Text

    text = Text()
    for section in sections(plan):
        if section.title:
            text.append(f"{section.title}\n", style="bold")
        if section.header:
            text.append(textwrap.indent(table_rows(section.header, section.rows, as_markdown=False), " "))
            continue
        beside = min(_LABEL, max(len(label) for label, _ in section.rows))
        room = max(width - beside - 3, 16)
        for label, value in section.rows:
            columns = (textwrap.wrap(each, most, break_on_hyphens=False) for each, most in ((label, beside), (value, room)))
            pairs = itertools.zip_longest(*columns, fillvalue="")
            for left, right in pairs:
                text.append(f" {left:<{beside}}  " if right else f" {left}", style="cyan")
                text.append(f"{right}\n")
    text.rstrip()
    return text


_LABEL = 24
"""The width of the column of labels, in characters. Longer labels are wrapped."""


def markdown(plan: Plan | dict[str, Any]) -> str:
    """Return the text of a plan or budget as Markdown, with a table for each section."""
    parts = []
    for section in sections(plan):
        table = table_rows(section.header or ("", ""), section.rows, as_markdown=True)
        parts.append(f"**{section.title}**\n\n{table}" if section.title else table)
    return "\n".join(parts)


# -- sections ---------------------------------------------------------------------------------------------------------


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Return rows (label, text) about memory (whether the run fits), time and cost."""
    needed, settings, most = _gb(plan.memory.needed), plan.settings, plan.most_memory
    has = "" if plan.capacity_bytes is None else f" of {_gb(usable_bytes(plan.hardware))}"
    needed += "" if most is None else f" (at most {_gb(most)})"
    host = f", and {_gb(plan.host_bytes)} of {plan.hardware.host['memory_gb'] or 'unknown'} GB per machine for cpu_offload"
    needed += f"{has} per rank{host if plan.host_bytes else ''}"
    rows = [("memory", f"{verdict(plan)}: {'' if plan.memory.is_known else 'at least '}{needed}")]
    if plan.run_seconds is None:
        why = f"no dense peak for {plan.hardware.name} at {settings.precision} (--hardware auto measures it)"
        if plan.times.compute is not None:
            why = f"the host of {plan.hardware.name} has no copy_gbps or memory_gbps for cpu_offload"
        elif not plan.hardware.multiplies(settings.precision):
            why = f"{plan.hardware.name} has no units for bf16 (--trainer.precision {settings.precision.replace('bf', '')})"
        return [*rows, ("time", f"unknown: {why}"), ("cost", "unknown, as the time is")]
    speed = ", assuming the speed of the final batch throughout" if settings.ramp else ""
    band = "" if plan.band is None else f" ({' to '.join(duration(plan.run_seconds * end) for end in plan.band)})"
    hours = two_digits(plan.device_hours or 0)
    rows.append(("time", f"about {duration(plan.run_seconds)}{band} on {devices(plan)} = {hours} device-hours{speed}"))
    if plan.usd is None:
        return [*rows, ("cost", f"unknown: no price for {plan.hardware.name} (--price)")]
    source = "at the assumed price range of the hardware table" if plan.options.price_usd_hour is None else "at the given price"
    least, most_time = plan.band or (1.0, 1.0)
    cost = money_range(plan.usd[0] * least, plan.usd[1] * most_time)
    return [*rows, ("cost", f"{'' if cost.startswith('less') else 'about '}{cost} {source}")]


def verdict(plan: Plan) -> str:
    """Return "fits", "DOES NOT FIT", "unknown whether it fits", or "probably fits": the planned memory fits into the device,
    but `Plan.most_memory`, the most that a rank may need, does not."""
    if plan.fits and plan.most_memory is not None and plan.most_memory > usable_bytes(plan.hardware):
        return "probably fits"
    return {True: "fits", False: "DOES NOT FIT", None: "unknown whether it fits"}[plan.fits]


def _model(plan: Plan) -> list[tuple[str, str]]:
    model = plan.settings.model
    if isinstance(model, OwnModel):
        return _custom_model(plan, model)
    parts = ", ".join(f"{name} {count(n)}" for name, n in plan.parts.items())
    heads = f"{model.n_head} heads" + (f" ({model.kv_heads} key/value)" if model.kv_heads != model.n_head else "")
    if model.latent is not None:
        heads += f", latents of {model.latent.kv_rank} + {model.latent.rope_head_dim}"
    kind = (
        f"{model.n_layer} layers, width {model.n_embd}, {heads}, {model.mlp} {model.hidden_width}, context {model.block_size}"
    )
    if model.moe is not None:
        moe = model.moe
        kind += (
            f"; in {model.experts_layers} layers {moe.experts} experts of {moe.width(model.hidden_width)}, {moe.top_k} a token"
        )
        kind += f", and shared ones of {shared}" if (shared := moe.width_of_shared(model.hidden_width)) else ""
    kind += f"; {model.predict_ahead} more to predict further tokens" if model.predict_ahead else ""
    vocabulary = f"{model.vocab_size:,}"
    if model.padded_vocab_size != model.vocab_size:
        vocabulary += f", padded to {model.padded_vocab_size:,}"
    trained = plan.trained_parameters
    share = f", of which {trained:,} are trained ({trained / plan.parameters:.2%})" if plan.settings.lora else ""
    if model.moe is not None:
        share = f", of which {plan.active_parameters:,} compute a token ({plan.active_parameters / plan.parameters:.2%})"
    return [("parameters", f"{plan.parameters:,}{share}"), ("by part", parts), ("shape", f"{kind}, vocabulary {vocabulary}")]


def _custom_model(plan: Plan, model: OwnModel) -> list[tuple[str, str]]:
    frozen = plan.parameters - plan.trained_parameters
    return [
        ("parameters", f"{plan.parameters:,}" + (f", of which {frozen:,} are frozen" if frozen else "")),
        ("by part", ", ".join(f"{name} {count(n)}" for name, n in plan.parts.items())),
        ("class", f"{model.architecture.class_path}, context {model.block_size}, vocabulary {model.vocab_size:,}"),
        *(("note", note) for note in plan.memory.notes),
    ]


def _run(plan: Plan) -> list[tuple[str, str]]:
    settings, layout = plan.settings, plan.settings.layout
    weight, operand = settings.sizes
    optimizer, mode = settings.optimizer, settings.compute.activation_checkpointing
    every = f"one block in {mode}, from its input; the others keep everything (--compute.activation_checkpointing)"
    known = "" if optimizer.is_known else " (unknown optimizer, counted as AdamW)"
    dimensions = {
        "pipeline": layout.pipeline.ranks,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context,
        "tensor parallel": layout.tensor_parallel,
        "expert": layout.expert,
    }
    mesh = [f"{name} {n}" for name, n in dimensions.items() if n > 1]
    if layout.divisor("parameters") > 1:
        mesh.append(f"gathers weights {'once a step' if layout.kept.weights else 'twice a micro-batch'}")
        mesh.append(f"reduces gradients {'once a step' if layout.kept.gradients else 'after each micro-batch'}")
    mesh += [f"schedule {layout.pipeline.schedule}"] if layout.pipeline.ranks > 1 else []
    of_length = f" of {settings.sequence_length:,}" if settings.sequence_length != settings.model.block_size else ""
    accumulated = f" x {settings.accumulation} accumulated" if settings.accumulation > 1 else ""
    stages = ", ".join(f"{size:,} sequences from step {first + 1:,} on" for first, size in settings.ramp)
    rows = [
        (
            "batch",
            f"{settings.global_batch_size:,} sequences{of_length} = {settings.tokens_per_step:,} tokens: "
            f"{settings.sequences} per micro-batch{accumulated} x {layout.data_parallel} data-parallel",
        ),
        *([("batch ramp", f"{stages}. Per-step figures describe the final batch")] if stages else []),
        ("tokens", f"{settings.max_steps:,} steps = {count(settings.tokens)} ({settings.tokens:,})"),
        ("data", _data(plan)),
        *([("mixture", uneven)] if (uneven := _uneven(settings.data.phases, settings.global_batch_size)) else []),
        *([("packing", settings.data.packing)] if settings.data.packing else []),
        ("precision", f"{settings.precision}: weights, gradients, state {weight} bytes, matrix products {operand} bytes"),
        ("parallelism", f"{layout.strategy}, {devices(plan)}" + (f": {', '.join(mesh)}" if mesh else "")),
        *([] if mode == "none" else [("recomputed", mode if isinstance(mode, str) else every)]),
        (
            "optimizer",
            f"{optimizer.name}, state {plan.state_bytes / plan.parameters:.2f} bytes per parameter = {size(plan.state_bytes)}"
            f"{known}",
        ),
    ]
    parts = "; ".join(f"{p.name} {counted(p.steps, 'step')}, {count(p.tokens)} tokens" for p in plan.phases)
    rate = settings.schedule.rate
    drawn = f": {parts}  {sparkline(rate, settings.max_steps)}" if rate else ""
    rows.append(("schedule", f"{settings.schedule.kind}{drawn}"))
    if plan.rates_at and (at := plan.options.at):
        rates = ", ".join(f"{name} {rate!r}" for name, rate in plan.rates_at.items())
        rows.append((f"step {at:,}", f"{rates}; {count(settings.tokens_before(at))} tokens by its end"))
    scale = (
        f"{settings.tokens / plan.active_parameters:.3g} tokens per parameter, {plan.chinchilla_multiple:.3g} x Chinchilla's 20"
    )
    if plan.active_parameters >= 4e7 and settings.tokens >= 1e9:  # below that, the fit is an extrapolation
        scale += (
            f"; its fit predicts {plan.chinchilla_loss:.2f} nats (on its own text, vocabulary 32,000, one epoch: compare "
            "differences only)"
        )
    rows.append(("scale", scale))
    return rows


def _data(plan: Plan) -> str:
    data = plan.settings.data
    if not data.train_tokens:
        return f"dataset size: {data.origin}"
    tokens = f"{count(data.train_tokens)} tokens ({data.origin})"
    if data.phases:  # sources that the run reads more often than repetition helps
        last = data.phases[-1].sources.items()
        many = [f"{name} {source.epochs:.3g} epochs" for name, source in last if source.epochs > _MANY_EPOCHS]
        often = f": {', '.join(many)}{_REPEATED}" if many else ""
        return f"{tokens}, a mixture{often}"
    assert plan.epochs is not None
    return f"{tokens}: {plan.epochs:.3g} epochs{_REPEATED if plan.epochs > _MANY_EPOCHS else ''}"


def _mixture(plan: Plan) -> list[tuple[str, ...]]:
    """Return the rows of the mixture's table, one for each phase and source, with the columns `_MIXTURE`."""
    settings = plan.settings
    total = settings.tokens // settings.sequence_length
    rows: list[tuple[str, ...]] = []
    for phase in settings.data.phases:
        samples = sum(source.samples for source in phase.sources.values())
        end = f"to step {steps_for(settings.stages, phase.end):,} ({100 * phase.end / total:.3g} %)"
        for name, source in phase.sources.items():
            if source.samples:
                share = f"{100 * source.samples / samples:.3g} %"
                cap = "" if source.max_epochs is None else f"{source.max_epochs:g}"
                rows.append((end, name, share, f"{source.tokens:,}", f"{source.epochs:.3g}", cap))
                end = ""
    return rows


def _uneven(phases: Sequence[PhaseDraws], global_batch: int) -> str:
    """Return a sentence about the phase in which sources deviate most from their weights; "" if no source of any phase deviates
    by more than `global_batch` sequences, the sequences of a step.
    """
    worst = max(phases, key=lambda phase: phase.largest_deviation, default=None)
    if worst is None or worst.largest_deviation <= global_batch:
        return ""
    return (
        f"shares of phase {phases.index(worst) + 1} are exact every {worst.period:,} sequences, and in between up to "
        f"{worst.largest_deviation:,.0f} sequences off, {worst.largest_deviation / global_batch:.3g} steps: round the weights"
    )


def sparkline(rate: Callable[[int], float], total_steps: int, width: int = 40) -> str:
    """Return the rates of up to `width` evenly spaced steps as a line of bar characters. The tallest bar is the peak."""
    width = min(width, total_steps)
    values = [rate(1 + round(i * (total_steps - 1) / max(1, width - 1))) for i in range(width)]
    top = max(values) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


def _memory(plan: Plan) -> list[tuple[str, str]]:
    memory = plan.memory
    rows = [(name, size(n)) for name, n in memory.parts.items()]
    rows.append(("total", size(memory.total) if memory.is_known else f"at least {size(memory.total)}: activations are unknown"))
    if memory.reserved is not None and memory.is_known:
        rows.append(("reserved", f"{size(memory.reserved)} by CUDA's allocator"))
    if plan.capacity_bytes is not None:
        reserved = f", {CONTEXT_GB:g} GB of it for the driver" if plan.hardware.is_gpu else ""
        rows.append(("capacity", f"{plan.hardware.name}: {size(plan.capacity_bytes)}{reserved}"))
        largest = plan.largest_micro_batch
        if largest is not None:
            rows.append(("largest micro-batch", f"{largest} sequences" if largest else "none, not even one sequence fits"))
    if plan.next_steps:
        rows.append(("to save memory", "; ".join(map(_saving, plan.next_steps))))
    return rows


def _saving(step: NextStep) -> str:
    """Return a flag, the memory that it saves, and its price: "--trainer.strategy.cpu_offload true (-3.21 GB, for 24.92 GB
    of each machine's memory and 4.5 s a step)".
    """
    price = f", for {_gb(step.host_bytes)} of each machine's memory" if step.host_bytes else ""
    price += f" and {duration(step.step_seconds)} a step" if step.step_seconds else ""
    return f"{step.flag} (-{_gb(step.saves_bytes)}{price})"


def _gb(number: float) -> str:
    """Return the text of a number of bytes, in GB, or in MB below 0.1 GB."""
    return size(number).partition(" (")[0]


def _time(plan: Plan) -> list[tuple[str, str]]:
    settings, times, flops = plan.settings, plan.times, plan.flops
    if isinstance(settings.model, OwnModel):
        how = "assumed: six per parameter" if flops.total == 6 * plan.parameters else "counted in a trace"
        per_token = f"{flops.total:.4g} ({how})"
    else:
        per_token = (
            f"{flops.total:.4g} = 6 N {flops.matmul:.4g} + attention {flops.attention:.4g} (full; causal: "
            f"{flops.attention_causal:.4g})"
        )
    rows = [
        ("FLOPs per token", per_token),
        ("FLOPs", f"{flops.total * settings.tokens_per_step:.4g} per step, {plan.flops_per_run:.4g} in total"),
    ]
    measured = plan.options.measured
    if plan.measured is not None:
        rows.append(("measured", plan.measured))
    if times.step is None:
        return rows
    again = f", {times.recomputation:.2f} x for recomputation" if times.recomputation > 1.001 else ""
    origin = plan.mfu_origin if measured is None else measured.origin(plan.mfu_origin, plan.hardware)
    reached = "as measured, for the work of this step; the dense peak is unknown"
    if plan.peak_tflops is not None and plan.mfu is not None:
        reached = f"MFU {percent(plan.mfu)} ({origin}) of {plan.peak_tflops:g} TFLOP/s dense"
    speed = plan.tokens_per_second or 0.0
    band = "" if plan.band is None else f" ({' to '.join(two_digits(speed / end) for end in reversed(plan.band))})"
    rows += [("speed", f"{reached}{again}"), ("step", f"{duration(times.step)}, {two_digits(speed)} tokens/s{band}")]
    causes = {"compute": times.compute, "communication": times.communication, "optimizer on the host": times.host}
    parts = [f"{name} {duration(seconds)}" for name, seconds in causes.items() if seconds]
    rows.append(("limit", f"{times.limit} (per step: {', '.join(parts)})"))
    if (faster := plan.faster_micro_batch) is not None:
        larger, seconds = faster
        rows.append(("to save time", f"--data.micro_batch_size {larger} ({percent(1 - seconds / times.step)} less a step)"))
    if plan.mwh is not None:
        rows.append(("energy", _energy(plan.mwh, plan.hardware.watts)))
    if plan.host_bytes:
        copies, host = (plan.hardware.host[key] or "unknown" for key in ("copy_gbps", "memory_gbps"))
        speeds = f"assumed, not measured: copies at {copies} GB/s a device, the optimizer at {host} GB/s of memory a machine"
        rows.append(("cpu_offload", speeds))
    if plan.options.served_tokens:  # 2·N a served token, 6·N in training (Sardana & Frankle 2023)
        served = 2 * plan.active_parameters * plan.options.served_tokens
        total = 6 * plan.active_parameters * settings.tokens + served
        said = f"{total:.4g} FLOPs with {count(plan.options.served_tokens)} tokens served ({served / total:.0%})"
        if plan.usd is not None:
            usd = (each * served / plan.flops_per_run for each in plan.usd)
            said += f", which cost {money_range(*usd)} at the price of a FLOP in training"
        rows.append(("lifetime", said))
    return rows


def _communication(plan: Plan) -> list[tuple[str, str]]:
    settings, times, given = plan.settings, plan.times, plan.options.scaling_efficiency is not None
    rows = [
        (f"{name}", f"{size(n)} per rank and step")
        for name, n in communicated_bytes(settings, cuda=plan.hardware.is_gpu).items()
    ]
    is_known = given or bool(rows and times.communication is not None)
    if rows and times.communication is not None:
        exposed = "" if given else f", {duration(times.exposed)} of it not overlapped"
        rows.append(("time", f"{duration(times.communication)} per step{exposed}"))
    if plan.efficiency is not None and is_known:
        waited = f" (given): a step waits for {duration(times.exposed)}" if given else ""
        rows.append(("scaling efficiency", percent(plan.efficiency) + waited))
    layout = settings.layout.pipeline
    if layout.ranks > 1:
        how = f"{layout.ranks} ranks, schedule {layout.schedule}, {settings.accumulation} micro-batches"
        rows.append(("pipeline bubble", f"{percent(plan.pipeline_bubble)} with {how}"))
    if plan.options.slowest_rank > 1:
        rows.append(("slowest rank", f"{plan.options.slowest_rank:g} x the mean: every step waits for it"))
    return rows


def _upkeep(plan: Plan) -> list[tuple[str, str]]:
    settings = plan.settings
    interval = plan.best_interval_seconds
    between = two_digits(plan.mtbf_seconds / 3600)
    steps = f" = {two_digits(max(1.0, interval / plan.times.step), whole=True)} steps" if plan.times.step else ""
    given = "" if plan.options.mtbf_hours else ", assuming 50,000 device-hours"
    saved = "weights, their average and optimizer state" if settings.ema else "weights and optimizer state"
    (ranks, _, machines), options = plan.writers, plan.options
    writing = f"{counted(machines, 'machine')} at {options.save_gbps:g} GB/s{' each' if machines > 1 else ''}"
    writing += f", {options.storage_gbps:g} GB/s in all" if options.storage_gbps else ""
    how = f"{'in parts' if ranks > 1 else 'whole'} (--sharded_checkpoints), "
    how += f"in the {'background' if plan.copy_bytes else 'foreground'} (--async_checkpoints): training waits "
    known = not plan.copy_bytes or plan.hardware.host["copy_gbps"] is not None
    how += f"{'' if known else 'at most '}{duration(plan.wait_seconds)}"
    if plan.copy_bytes:
        how += f" for a copy, {size(plan.copy_bytes)} of host memory on {'each' if machines > 1 else 'the'} machine"
    rule = "the time to write" if plan.copy_bytes and interval == plan.save_seconds else "Young's rule for this wait"
    rows = [
        ("checkpoint", f"{saved}, {size(plan.checkpoint_bytes)}, {duration(plan.save_seconds)} to write: {writing}"),
        ("saved", how),
        (
            "best interval",
            f"{duration(interval)}{steps} by {rule}, {between} h between failures{given}: {_lost(plan.lost_fraction)}",
        ),
    ]
    if settings.checkpoint_every_n_steps:
        every = f"every {counted(settings.checkpoint_every_n_steps, 'step')}"
        if plan.times.step:
            seconds = settings.checkpoint_every_n_steps * plan.times.step
            every += f" = {duration(seconds)}: {_lost(plan.lost(seconds))}"
        kept = min(settings.checkpoint_keep_last + 1, -(-settings.max_steps // settings.checkpoint_every_n_steps))
        rows.append(("configured", f"{every}; keeps up to {kept} = {size(kept * plan.checkpoint_bytes)}"))
    if settings.validation_every_n_steps:
        passes = f"{plan.validations:,} pass{'es' * (plan.validations != 1)}"
        text = f"every {counted(settings.validation_every_n_steps, 'step')}, {passes}"
        tokens = settings.data.val_tokens
        if tokens:
            text += f" over {count(tokens)} tokens"
        if plan.validation_seconds is not None and plan.run_seconds:
            share = plan.validation_seconds * plan.validations / plan.run_seconds
            text += f", {duration(plan.validation_seconds)} each: {percent(share)} of the training time"
        rows.append(("validation", text))
    return rows


def _lost(fraction: float) -> str:
    return f"{percent(fraction)} lost" if fraction < 1 else "no progress between failures"


def _energy(mwh: float, watts: float | None) -> str:
    return f"{two_digits(mwh)} MWh at {watts:g} W a device, the rated power, without hosts, network and cooling"


def _budget(figures: dict[str, Any]) -> list[Section]:
    rows = [("budget", f"{figures['flops']:.4g} FLOPs = 6 x parameters x tokens, of a dense transformer without its attention")]
    if "seconds" in figures:
        where = f"on {figures['hardware']} = {two_digits(figures['device_hours'])} device-hours"
        rows.append(("time", f"{duration(figures['seconds'])} {where}, {figures['speed']}"))
        rows += [("cost", f"{money_range(*figures['usd'])} at {figures['price']}")] if figures["usd"] else []
        rows += [("energy", _energy(figures["mwh"], figures["watts"]))] if figures["mwh"] else []
    rows.append(("optimum", "20 tokens per parameter (Hoffmann et al. 2022, approaches 1 and 2)"))
    rows.append(("loss", "nats, by the fit of their approach 3, which itself prefers smaller models. Compare differences only"))
    models = [
        (each["name"], count(n := each["parameters"]), count(d := each["tokens"]), f"{d / n:.3g}", f"{each['loss']:.3f}")
        for each in figures["models"]
    ]
    header = ("model", "parameters", "tokens", "per parameter", "loss")
    return [Section("Compute-optimal", rows), Section("Models of this budget", models, header)]


# -- tables -----------------------------------------------------------------------------------------------------------


def devices(plan: Plan) -> str:
    """Return the number and the kind of the planned devices, such as "8 x a100-80gb"."""
    return f"{plan.settings.layout.devices} x {plan.hardware.name}"


SWEEP = ("memory GB", "fits", "largest micro-batch", "step", "tokens/s", "run", "device-hours", "USD", "limit")


def sweep_row(variant: Variant) -> list[str]:
    """Return one row of a sweep's table: the variant's values of the swept settings, then the columns of SWEEP."""
    plan = variant.plan
    if plan is None:
        return [*variant.values.values(), *["–"] * len(SWEEP)]
    fits = {True: "yes", False: "NO", None: "?"}[plan.fits]
    cells = [*variant.values.values(), f"{plan.memory.needed / 1e9:.2f}", fits]
    cells.append("?" if plan.largest_micro_batch is None else str(plan.largest_micro_batch))
    if plan.run_seconds is None or plan.times.step is None:
        return [*cells, *["?"] * 6]
    times = [duration(plan.times.step), two_digits(plan.tokens_per_second or 0), duration(plan.run_seconds)]
    money = money_range(*plan.usd) if plan.usd else "?"
    return [*cells, *times, two_digits(plan.device_hours or 0), money, plan.times.limit or "?"]


def table_rows(header: Sequence[str], rows: Sequence[Sequence[str]], *, as_markdown: bool) -> str:
    """Return a table as text: in Markdown, or with columns aligned by spaces."""
    if as_markdown:
        marked = [header, ["---"] * len(header), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in marked) + "\n"
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines) + "\n"
