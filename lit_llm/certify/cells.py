"""The trainings that are compared: layouts of N devices, and settings chosen so that every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout_problems import compile_problem

AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("32-true", "bf16-mixed", "bf16-true", "float8"),
    "compile": (False, True),
    "activation_checkpointing": ("none", "full", "attention", "cheap"),
    "optimizer": ("AdamW", "Muon"),
}
PLAIN = {name: values[0] for name, values in AXES.items()}
"""The first value of each axis. Every layout is tried with these, and then one must pass: it is required."""
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2**-7, "bf16-true": 2**-7, "float8": 2**-6}
"""Of a loss, relative. fp32: sums in another order over 20 steps. bf16: two steps of its 8 bits. float8: products of 4 bits."""


def layouts(devices: int) -> dict[str, dict[str, Any]]:
    """Name → strategy and size of the model, as settings of `training.train`. Layouts of experts have a model with experts."""
    sparse: dict[str, Any] = {"size": "experts"}
    if devices == 1:
        return {"one": {"strategy": "auto"}, "one-experts": {"strategy": "auto", **sparse}}
    found: dict[str, Any] = {
        "ddp": "ddp",
        "fsdp2": {"shard": devices},
        "replicas": {"replicate": devices, "shard": 1},
        "tp": {"shard": 1, "tensor_parallel": devices},
        "context": {"shard": 1, "context": devices},
        "heads": {"shard": 1, "context": devices, "context_attention": "heads"},
    }
    if devices % 2 == 0:
        found["pp"] = {"shard": devices // 2, "pipeline": 2}
        if devices > 2:
            found["hsdp"] = {"replicate": 2, "shard": devices // 2}
            found["fsdp2-tp"] = {"shard": devices // 2, "tensor_parallel": 2}
            found["fsdp2-context"] = {"shard": devices // 2, "context": 2}
    with_experts: dict[str, Any] = {"fsdp2-experts": {"shard": devices}, "experts": {"shard": devices, "expert": devices}}
    if devices % 2 == 0 and devices > 2:
        with_experts["experts-tp"] = {"shard": devices // 2, "tensor_parallel": 2, "expert": devices // 2}
    return {name: {"strategy": strategy} for name, strategy in found.items()} | {
        name: {"strategy": strategy, **sparse} for name, strategy in with_experts.items()
    }


def pairwise(
    axes: dict[str, tuple[Any, ...]], first: list[dict[str, Any]], possible: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Few possible combinations in which each pair of values of two axes occurs. They begin with those of `first`.

    Greedy: each is the combination with most pairs that do not occur yet. Equal ones are taken in the order of the axes.
    """
    names = list(axes)
    every = (tuple(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))
    combinations = [each for each in every if possible(dict(each))]
    missing = {pair for each in combinations for pair in itertools.combinations(each, 2)}
    chosen = list(first)
    for each in first:
        missing -= set(itertools.combinations(each.items(), 2))
    while missing:
        best = max(combinations, key=lambda each: sum(pair in missing for pair in itertools.combinations(each, 2)))
        missing -= set(itertools.combinations(best, 2))
        chosen.append(dict(best))
    return chosen


def cells(devices: int, *, float8: bool) -> dict[str, dict[str, Any]]:
    """Name → settings of `training.train`: the plain ones, then eager ones, because a small budget shows more of them."""
    names = layouts(devices)
    axes = {"layout": tuple(names), **AXES}
    if not float8:
        axes["precision"] = tuple(each for each in axes["precision"] if each != "float8")
    plain = [{"layout": layout, **PLAIN} for layout in names]
    found = {}

    def possible(cell: dict[str, Any]) -> bool:
        strategy = names[cell["layout"]]["strategy"]
        sizes = strategy if isinstance(strategy, dict) else {}
        compute = ComputeConfig(cell["activation_checkpointing"], compile=cell["compile"])
        shared_and_compiled = compute.compile and sizes.get("expert", 1) > 1
        return not shared_and_compiled and compile_problem(sizes.get("tensor_parallel", 1), compute) is None

    for cell in sorted(pairwise(axes, plain, possible), key=lambda each: each["compile"]):
        layout, mode = cell.pop("layout"), "compiled" if cell["compile"] else "eager"
        words = (layout, cell["precision"], mode, cell["activation_checkpointing"], cell["optimizer"])
        found["losses/" + "/".join(words)] = {"do": "train", **names[layout], **cell}
    return found
