"""What a dry run found, for a terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_llm.config.dry_run import Rehearsal
from lit_llm.training.dry_run import RankRun

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(found: Rehearsal) -> RenderableType:
    """Tables for rich's console."""
    from rich.console import Group
    from rich.table import Table

    used = {name: size for name, size in found.sizes._asdict().items() if size > 1}
    mesh = " × ".join(f"{name} {size}" for name, size in used.items()) or "no mesh"
    shape = f"{found.cluster.nodes:,} × {found.cluster.per_node:,} processes: {mesh}"
    parts: list[Any] = [f"{shape}; {found.micro_batches:,} micro-batches a step"]
    for run in found.ranks:
        parts.append(f"\n{_title(run, used)}")
        memory = Table(show_header=False, box=None)
        for kind, size in sorted(run.memory.items(), key=lambda item: -item[1]):
            memory.add_row(kind, _gigabytes(size))
        memory.add_row("peak of a step", _gigabytes(run.peak))
        parts.append(memory)
        if run.collectives:
            traffic = Table(box=None)
            for heading in ("along", "collective", "ranks", "calls a step", "GB of whole tensors", "GB sent"):
                traffic.add_column(heading, justify="left" if heading in ("along", "collective") else "right")
            for row in run.collectives:
                sizes = (f"{size / 1e9:,.6f}" for size in (row.size, row.sent))
                traffic.add_row(row.dimension, row.kind, f"{row.ranks:,}", f"{row.calls:,}", *sizes)
            parts.append(traffic)
        parts.append(f"sends {run.sent / 1e9:,.3f} GB a step; dry run of this rank: {run.seconds:.1f} s")
    return Group(*parts)


def as_dict(found: Rehearsal) -> dict[str, Any]:
    """All figures, raw, units in their names."""
    return {
        "processes": found.cluster.world,
        "nodes": found.cluster.nodes,
        "mesh": found.sizes._asdict(),
        "micro_batches": found.micro_batches,
        "notes": found.notes,
        "ranks": [
            {
                "rank": run.rank,
                "place": run.place._asdict(),
                "layers": run.layers,
                "parameters": run.parameters,
                "peak_bytes": run.peak,
                "memory_bytes": run.memory,
                "sent_bytes_per_step": run.sent,
                "collectives_per_step": [row._asdict() for row in run.collectives],
                "micro_batches_counted": run.counted,
                "seconds": run.seconds,
            }
            for run in found.ranks
        ],
    }


def _title(run: RankRun, used: dict[str, int]) -> str:
    place = ", ".join(f"{name} {at}" for name, at in run.place._asdict().items() if name in used)
    where = f" ({place})" if place else ""
    blocks = f"{len(run.layers)} blocks ({_ranges(run.layers)})" if run.layers else "no block"
    return f"rank {run.rank}{where}: {blocks}, {run.parameters:,} parameters"


def _ranges(numbers: list[int]) -> str:
    """Such as "0 to 3, 8 to 11"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 1 else f"{each[0]}" for each in found)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB ({size / 2**30:,.3f} GiB)"
