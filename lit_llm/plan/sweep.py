"""Compare the plans of many combinations of settings, and find the cheapest combination within given limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_llm.core import hardware as hardware_table
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.hardware import Hardware
from lit_llm.core.yaml_reading import read_yaml_file
from lit_llm.distributed.parallel_layout import STRATEGIES, Layout, layout_of_name
from lit_llm.plan.plan import Options, Plan, make_plan
from lit_llm.plan.planned_run import CHECKPOINTING, PlannedRun, canonical_precision

LayoutOf = Callable[[int, int], Layout]
"""A function from (number of devices, devices per node) to a layout."""
MOST = 10_000_000
"""The largest number of devices, sequences or tokens in a sweep."""
_OVERLAYS = Path(__file__).parents[1] / "recipes" / "precision"
_ZERO = "ZeRO-2 is fsdp2 with --trainer.strategy.reshard_after_forward false, ZeRO-1 also with .reduce_each_micro_batch false"


def _number(key: str, word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word[:20]) <= MOST:
        raise UserError(f"{key}={word[:60]} must be a whole number of at least 1 and at most {MOST:,} (--sweep).")
    return int(word)


def _strategy(key: str, word: str) -> str:
    if word not in STRATEGIES:
        use = _ZERO if word.startswith("zero") else f"use {', '.join(STRATEGIES)}"
        raise UserError(f"Cannot sweep strategy={word}: {use} (--sweep).")
    return word


def _precision(key: str, word: str) -> dict[str, Any]:
    """Return the recipe's settings for the precision `word`: a file's name in `recipes/precision`, or a Trainer's precision."""
    overlays = {file.stem: file for file in sorted(_OVERLAYS.glob("*.yaml"))}
    if word in overlays:
        return read_yaml_file(overlays[word])
    try:
        return {"trainer": {"precision": canonical_precision(word)}}
    except UserError:
        raise UserError(f"Cannot sweep precision={word}: use {', '.join(overlays)} (--sweep).") from None


def _checkpointing(key: str, word: str) -> str | int:
    if word not in CHECKPOINTING and not word.isdecimal():
        raise UserError(f"activation_checkpointing={word} must be {', '.join(CHECKPOINTING)} or a number (--sweep).")
    return _number(key, word) if word.isdecimal() else word


KEYS: dict[str, Callable[[str, str], Any]] = {  # key of a sweep -> function that parses a word of it
    "devices": _number,
    "strategy": _strategy,
    "precision": _precision,
    "hardware": lambda key, word: hardware_table.find(word),
    "micro_batch_size": _number,
    "activation_checkpointing": _checkpointing,
    "chunk_size": _number,
}
DEFAULT = {
    "devices": ["1", "2", "4", "8", "16", "32", "64"],
    "strategy": ["ddp", "fsdp2"],
    "micro_batch_size": ["1", "2", "4", "8", "16", "32", "64"],
    "activation_checkpointing": ["none", "full"],
}
"""The sweep that is used when a memory or time limit is given without a sweep."""


@dataclass(frozen=True)
class Variant:
    """Record of one combination of swept values ({key: value}) and its plan. If there is no plan, `problem` says why."""

    values: dict[str, str]
    plan: Plan | None
    problem: str = ""


def parse(words: list[str]) -> dict[str, list[str]]:
    """Parse words such as `devices=1,8` and `strategy=ddp,fsdp2` into {key: list of values}.

    Raises:
        UserError: one sentence per word that is not key=value,value or whose key cannot be swept.
    """
    axes, problems = {}, []
    for word in words:
        key, equals, values = word.partition("=")
        if key not in KEYS or not equals or not values:
            use = f"strategy={key}" if key in STRATEGIES else f"key=value,value with one of the keys {', '.join(KEYS)}"
            problems.append(f"Cannot sweep {word!r}: use {use} (--sweep).")
        elif key in axes:
            problems.append(f"{key} is swept twice: give all its values to one --sweep {key}=A,B.")
        else:
            axes[key] = values.split(",")
    refuse(problems)
    return axes


def variants(
    axes: dict[str, list[str]], base: PlannedRun, layout: LayoutOf, hardware: Hardware, options: Options
) -> Iterator[Variant]:
    """Plan and yield every combination. A combination that is impossible or equals another has a problem instead of a plan.

    Args:
        axes: the result of `parse`. Settings that are not in `axes` are as in `base` and `hardware`.
        layout: function that returns the layout of the recipe's strategy, used if the sweep does not vary the strategy.

    Raises:
        UserError: a value is invalid in every combination (unknown hardware, precision or strategy, or not a number).
    """
    read = {key: {word: KEYS[key](key, word) for word in words} for key, words in axes.items()}
    for combination in itertools.product(*axes.values()):
        words = dict(zip(axes, combination, strict=True))
        values = {key: read[key][word] for key, word in words.items()}
        device = values.get("hardware", hardware)
        try:
            plan = make_plan(_changed(base, values, layout, device), device, options)
            sequences = plan.settings.sequences
            is_other = values.get("micro_batch_size", sequences) != sequences
            yield Variant(words, None if is_other else plan, f"is micro_batch_size={sequences}" if is_other else "")
        except UserError as error:
            yield Variant(words, None, str(error).splitlines()[0])


def fitting(compared: list[Variant], max_memory_gb: float | None) -> list[Variant]:
    """Return the variants that fit into device memory, or may fit, and need at most `max_memory_gb` GB (None: no limit)."""
    most = math.inf if max_memory_gb is None else max_memory_gb * 1e9
    return [v for v in compared if v.plan is not None and v.plan.fits is not False and v.plan.memory.needed <= most]


def cheapest(compared: list[Variant], *, max_memory_gb: float | None, deadline_hours: float | None) -> Variant | None:
    """Return the cheapest of the variants that fit the device and the limits; None if none does. A limit of None is no limit.

    If prices are unknown, return the variant with the fewest device-hours. If times are unknown too, return the variant with
    the fewest devices, and among equals the variant with the least memory.
    """
    candidates = []
    for variant in fitting(compared, max_memory_gb):
        plan = variant.plan
        assert plan is not None
        if deadline_hours is not None and (plan.run_seconds is None or plan.run_seconds > deadline_hours * 3600):
            continue
        cost = plan.usd[0] if plan.usd else plan.device_hours or 0.0
        candidates.append(((cost, plan.settings.layout.devices, plan.memory.needed), variant))
    return min(candidates, key=lambda item: item[0])[1] if candidates else None


def nearest(compared: list[Variant], max_memory_gb: float | None) -> Variant | None:
    """Return a variant to show if `cheapest` returns None: the fastest variant that fits, or if no variant fits, the variant
    with the least memory. None: no variant has a plan."""
    fits = fitting(compared, max_memory_gb)
    planned = [(v.plan, v) for v in fits or compared if v.plan is not None]
    if not planned:
        return None
    return min(planned, key=lambda each: ((each[0].run_seconds or math.inf) if fits else 0.0, each[0].memory.needed))[1]


def _changed(base: PlannedRun, values: dict[str, Any], layout: LayoutOf, hardware: Hardware) -> PlannedRun:
    devices, name, before = values.get("devices", base.layout.devices), values.get("strategy"), base.layout
    if name is None:
        after = layout(devices, hardware.devices_per_node)
    else:
        after = replace(layout_of_name(name, devices, hardware.devices_per_node), bucket_copies=False)  # as strategy/ddp
        if before.is_mesh and after.is_mesh and "fsdp" not in (before.strategy, name):  # an overlay leaves these
            after = replace(after, prefetch=before.prefetch, cpu_offload=before.cpu_offload)
            if before.pipeline.ranks == after.pipeline.ranks == 1:
                after = replace(after, kept=before.kept, auto=before.auto)
    run = replace(base, layout=after, micro_batch_size=values.get("micro_batch_size", base.micro_batch_size))
    if size := values.get("chunk_size"):
        run = run.changed("loss", chunk_size=size)
    if precision := values.get("precision"):
        run = replace(run, precision=precision["trainer"]["precision"]).changed("compute", **precision.get("compute", {}))
    mode = values.get("activation_checkpointing")
    return run if mode is None else run.changed("compute", activation_checkpointing=mode)
