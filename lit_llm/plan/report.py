"""A plan as one page: tables for a terminal, or Markdown. For JSON, see `json_output`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_llm.plan import checkpoints, compute, mixture
from lit_llm.plan.memory import BYTES, RESERVED_GB
from lit_llm.plan.pipeline import bubble
from lit_llm.plan.plan import ASSUMED_MFU, Plan
from lit_llm.plan.rank_traffic import communicated_bytes
from lit_llm.plan.schedule import sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType


_REPEATED = f": beyond about {mixture.MANY_EPOCHS}, repeated data help less (Muennighoff et al. 2023)"


@dataclass(frozen=True)
class Section:
    """A heading, and rows: of (label, text), or of the columns that `header` names."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()


def sections(plan: Plan, rate: Callable[[int], float] | None = None) -> list[Section]:
    """The sections of the page.

    Args:
        rate: the learning rate of an optimizer step, for the sparkline.
    """
    found = [
        Section("Model", _model(plan)),
        Section("Run", _run(plan, rate)),
        Section("Mixture", _mixture(plan), mixture.HEADER),
        Section(f"Memory per rank, peak ({plan.memory.moment})", _memory(plan)),
        Section("Compute and time", _time(plan)),
        Section("Communication", _communication(plan)),
        Section("Checkpoints and validation", _upkeep(plan)),
    ]
    return [section for section in found if section.rows]


def render(plan: Plan, rate: Callable[[int], float] | None = None) -> RenderableType:
    """Tables for rich's console."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    for section in sections(plan, rate):
        table = Table(
            title=section.title,
            title_justify="left",
            show_header=bool(section.header),
            box=None,
            padding=(0, 1),
            title_style="bold",
        )
        first, *others = section.header or ("", "")
        table.add_column(first, style="cyan", no_wrap=True)
        for name in others:
            table.add_column(name, overflow="fold")
        for row in section.rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def markdown(plan: Plan, rate: Callable[[int], float] | None = None) -> str:
    """One Markdown table per section."""
    parts = []
    for section in sections(plan, rate):
        table = table_rows(section.header or ("", ""), section.rows, as_markdown=True)
        parts.append(f"**{section.title}**\n\n{table}")
    return "\n".join(parts)


# -- sections ---------------------------------------------------------------------------------------------------------


def _model(plan: Plan) -> list[tuple[str, str]]:
    model = plan.settings.model
    parts = ", ".join(f"{name} {count(n)}" for name, n in plan.parts.items())
    heads = f"{model.n_head} heads" + (f" ({model.kv_heads} key/value)" if model.kv_heads != model.n_head else "")
    kind = (
        f"{model.n_layer} layers, width {model.n_embd}, {heads}, {model.mlp} {model.hidden_width}, context {model.block_size}"
    )
    vocabulary = f"{model.vocab_size:,}"
    if model.padded_vocab_size != model.vocab_size:
        vocabulary += f", padded to {model.padded_vocab_size:,}"
    trained = plan.trained_parameters
    share = f", of which {trained:,} are trained ({trained / plan.parameters:.2%})" if plan.settings.lora else ""
    return [("parameters", f"{plan.parameters:,}{share}"), ("by part", parts), ("shape", f"{kind}, vocabulary {vocabulary}")]


def _run(plan: Plan, rate: Callable[[int], float] | None) -> list[tuple[str, str]]:
    settings, layout = plan.settings, plan.settings.layout
    weight, operand = BYTES[settings.precision]
    optimizer = settings.optimizer
    known = "" if optimizer.is_known else " (unknown optimizer, counted as AdamW)"
    dimensions = {
        "pipeline": layout.pipeline.ranks,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context,
        "tensor parallel": layout.tensor_parallel,
    }
    mesh = [f"{name} {n}" for name, n in dimensions.items() if n > 1]
    if layout.divisor("parameters") > 1:
        mesh.append(f"gathers weights {'twice a micro-batch' if layout.reshard else 'once a step'}")
        mesh.append(f"reduces gradients {'once a step' if layout.reduce_once else 'after each micro-batch'}")
    mesh += [f"schedule {layout.pipeline.schedule}"] if layout.pipeline.ranks > 1 else []
    of_length = f" of {settings.sequence_length:,}" if settings.sequence_length != settings.model.block_size else ""
    accumulated = f" x {settings.accumulation} accumulated" if settings.accumulation > 1 else ""
    rows = [
        (
            "batch",
            f"{settings.global_batch:,} sequences{of_length} = {settings.tokens_per_step:,} tokens: "
            f"{settings.sequences} per micro-batch{accumulated} x {layout.data_parallel} data-parallel",
        ),
        *([("batch ramp", _ramp(plan))] if settings.ramp else []),
        ("tokens", f"{settings.steps:,} steps = {count(settings.tokens)} ({settings.tokens:,})"),
        ("data", _data(plan)),
        *([("mixture", uneven)] if (uneven := mixture.uneven(settings.data.phases, settings.global_batch)) else []),
        *([("packing", settings.data.packing)] if settings.data.packing else []),
        ("precision", f"{settings.precision}: weights, gradients, state {weight} bytes, matrix products {operand} bytes"),
        ("parallelism", f"{layout.strategy}, {devices(plan)}" + (f": {', '.join(mesh)}" if mesh else "")),
        (
            "optimizer",
            f"{optimizer.name}, state {plan.state_bytes / plan.parameters:.2f} bytes per parameter = {size(plan.state_bytes)}"
            f"{known}",
        ),
    ]
    parts = "; ".join(f"{p.name} {p.steps:,} steps, {count(p.tokens)} tokens" for p in plan.phases)
    drawn = f"  {sparkline(rate, settings.steps)}" if rate else ""
    rows.append(("schedule", f"{settings.schedule.kind}: {parts}{drawn}"))
    multiple = compute.chinchilla_multiple(plan.parameters, settings.tokens)
    scale = f"{settings.tokens / plan.parameters:.3g} tokens per parameter, {multiple:.3g} x Chinchilla's 20"
    if plan.parameters >= 4e7 and settings.tokens >= 1e9:  # below that, the fit is an extrapolation
        fitted = compute.chinchilla_loss(plan.parameters, settings.tokens)
        scale += (
            f"; its fit predicts {fitted:.2f} nats (on its own text, vocabulary 32,000, one epoch: compare differences only)"
        )
    rows.append(("scale", scale))
    return rows


def _ramp(plan: Plan) -> str:
    stages = ", ".join(f"{size:,} sequences from step {first + 1:,} on" for first, size in plan.settings.ramp)
    return f"{stages}. Per-step figures describe the final batch"


def _data(plan: Plan) -> str:
    data = plan.settings.data
    if not data.train_tokens:
        return f"dataset size: {data.origin}"
    tokens, often = f"{count(data.train_tokens)} tokens ({data.origin})", ""
    if data.phases:
        if many := mixture.repeated(data.phases):
            often = f": {', '.join(many)}{_REPEATED}"
        return f"{tokens}, a mixture{often}"
    epochs = plan.settings.tokens / data.train_tokens
    if epochs > mixture.MANY_EPOCHS:
        often = _REPEATED
    return f"{tokens}: {epochs:.3g} epochs{often}"


def _mixture(plan: Plan) -> list[tuple[str, ...]]:
    settings = plan.settings
    total = settings.tokens // settings.sequence_length
    return mixture.rows(settings.data.phases, settings.stages, settings.sequence_length, total)


def _memory(plan: Plan) -> list[tuple[str, str]]:
    memory = plan.memory
    rows = [(name, size(n)) for name, n in memory.parts.items()]
    rows.append(("total", size(memory.total)))
    if plan.capacity_bytes is not None:
        verdict = "fits" if plan.fits else "DOES NOT FIT"
        reserved = f", {RESERVED_GB:g} GB of it reserved for the driver" if plan.hardware.is_gpu else ""
        rows.append(("capacity", f"{plan.hardware.name}: {size(plan.capacity_bytes)}{reserved}: {verdict}"))
        largest = plan.largest_micro_batch
        rows.append(("largest micro-batch", f"{largest} sequences" if largest else "none, not even one sequence fits"))
    if plan.next_steps:
        switches = [f"{flag} (-{saved / 1e9:.2f} GB)" for flag, saved in plan.next_steps]
        rows.append(("to save memory", "; ".join(switches)))
    return rows


def _time(plan: Plan) -> list[tuple[str, str]]:
    settings, times, flops = plan.settings, plan.times, plan.flops
    rows = [
        (
            "FLOPs per token",
            f"{flops.total:.4g} = 6 N {flops.matmul:.4g} + attention {flops.attention:.4g} (full; causal: "
            f"{flops.attention_causal:.4g})",
        ),
        ("FLOPs", f"{flops.total * settings.tokens_per_step:.4g} per step, {flops.total * settings.tokens:.4g} in total"),
    ]
    if times.step is None or plan.run_seconds is None or plan.peak_tflops is None:
        rows.append(
            ("time", f"unknown: no dense peak for {plan.hardware.name} at {settings.precision} (--hardware auto measures it)")
        )
        return rows
    mfu = plan.options.mfu or ASSUMED_MFU
    again = f", {times.recomputation:.2f} x for recomputation" if times.recomputation > 1.001 else ""
    hours = plan.run_seconds * settings.layout.devices / 3600
    speed = ", assuming the speed of the final batch throughout" if settings.ramp else ""
    rows += [
        ("speed", f"MFU {mfu:.1%} ({plan.options.mfu_origin}) of {plan.peak_tflops:g} TFLOP/s dense{again}"),
        ("step", f"{duration(times.step)}, {settings.tokens_per_step / times.step:,.0f} tokens/s"),
        ("run", f"{duration(plan.run_seconds)} on {devices(plan)} = {hours:,.1f} device-hours{speed}"),
    ]
    if plan.usd:
        low, high = plan.usd
        source = (
            "at the given price"
            if plan.options.price_usd_hour is not None
            else "at the assumed price range of the hardware table"
        )
        rows.append(("cost", f"${low:,.2f} {source}" if low == high else f"${low:,.2f} to ${high:,.2f} {source}"))
    causes = {"compute": times.compute, "memory": times.memory, "communication": times.communication, "data": times.data}
    parts = [f"{name} {duration(seconds)}" for name, seconds in causes.items() if seconds]
    rows.append(("limit", f"{times.limit} (per step: {', '.join(parts)})"))
    if plan.options.served_tokens:
        total = compute.lifetime_flops(plan.parameters, settings.tokens, plan.options.served_tokens)
        served = 2 * plan.parameters * plan.options.served_tokens
        rows.append(
            ("lifetime", f"{total:.4g} FLOPs with {count(plan.options.served_tokens)} tokens served ({served / total:.0%})")
        )
    return rows


def _communication(plan: Plan) -> list[tuple[str, str]]:
    settings, times = plan.settings, plan.times
    rows = [
        (f"{name}", f"{size(n)} per rank and step")
        for name, n in communicated_bytes(settings, cuda=plan.hardware.is_gpu).items()
    ]
    if rows and times.communication is not None:
        rows.append(("time", f"{duration(times.communication)} per step, {duration(times.exposed)} of it not overlapped"))
        if plan.efficiency is not None:
            rows.append(("scaling efficiency", f"{plan.efficiency:.1%}"))
    layout = settings.layout.pipeline
    if layout.ranks > 1:
        share = bubble(layout, settings.accumulation)
        how = f"{layout.ranks} ranks, schedule {layout.schedule}, {settings.accumulation} micro-batches"
        rows.append(("pipeline bubble", f"{share:.1%} with {how}"))
    if plan.options.slowest_rank > 1:
        rows.append(("slowest rank", f"{plan.options.slowest_rank:g} x the mean: every step waits for it"))
    return rows


def _upkeep(plan: Plan) -> list[tuple[str, str]]:
    settings = plan.settings
    interval = checkpoints.young_interval_seconds(plan.save_seconds, plan.mtbf_seconds)
    lost = checkpoints.overhead_fraction(plan.save_seconds, interval, plan.mtbf_seconds)
    steps = f" = {max(1, round(interval / plan.times.step)):,} steps" if plan.times.step else ""
    given = "" if plan.options.mtbf_hours else ", assuming 50,000 device-hours"
    rows = [
        ("checkpoint", f"weights and optimizer state, {size(plan.checkpoint_bytes)}, {duration(plan.save_seconds)} to write"),
        *([("background copy", f"{size(plan.copy_bytes)} of host memory on each machine")] if plan.copy_bytes else []),
        (
            "best interval",
            f"{duration(interval)}{steps} by Young's rule for {plan.mtbf_seconds / 3600:,.0f} h between failures{given}: "
            f"{lost:.2%} lost",
        ),
    ]
    if settings.save_every:
        every = f"every {settings.save_every:,} steps"
        if plan.times.step:
            seconds = settings.save_every * plan.times.step
            share = checkpoints.overhead_fraction(plan.save_seconds, seconds, plan.mtbf_seconds)
            every += f" = {duration(seconds)}: {share:.2%} lost"
        kept = min(settings.keep_last + 1, -(-settings.steps // settings.save_every))
        rows.append(("configured", f"{every}; keeps up to {kept} = {size(kept * plan.checkpoint_bytes)}"))
    if settings.validate_every:
        text = f"every {settings.validate_every:,} steps, {plan.validations:,} passes"
        tokens = settings.data.val_tokens
        if tokens:
            text += f" over {count(tokens)} tokens"
        if plan.validation_seconds is not None and plan.run_seconds:
            share = plan.validation_seconds * plan.validations / plan.run_seconds
            text += f", {duration(plan.validation_seconds)} each: {share:.1%} of the training time"
        rows.append(("validation", text))
    return rows


# -- numbers as text --------------------------------------------------------------------------------------------------


def devices(plan: Plan) -> str:
    """For example "8 x a100-80gb"."""
    return f"{plan.settings.layout.devices} x {plan.hardware.name}"


def count(number: float) -> str:
    """For example "1.56 B", "124 M", "17 k"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes as GB (1e9) and GiB, or as MB below 0.1 GB."""
    if number < 1e8:
        return f"{number / 1e6:.1f} MB"
    return f"{number / 1e9:.2f} GB ({number / 2**30:.2f} GiB)"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.2f} days ({seconds / 3600:,.1f} h)"


def table_rows(header: Sequence[str], rows: Sequence[Sequence[str]], *, as_markdown: bool) -> str:
    """A table as text: Markdown, or columns aligned with spaces."""
    if as_markdown:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    return (
        "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in (header, *rows))
        + "\n"
    )
