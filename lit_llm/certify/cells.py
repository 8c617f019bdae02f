"""Trainings whose losses are compared with the losses of one process: for each layout of N devices, with all values of AXES."""

from __future__ import annotations

from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("32-true", "bf16-mixed", "bf16-true", "float8"),
    "compile": (False, True),
    "activation_checkpointing": ("none", "full", "attention", "cheap"),
    "optimizer": ("AdamW", "Muon"),
}
PLAIN = tuple(values[0] for values in AXES.values())
"""The first value of each axis in AXES. Required checks train every layout with these values."""
SETTINGS = (
    ("bf16-mixed", False, "full", "Muon"),
    ("bf16-true", False, "attention", "AdamW"),
    ("32-true", False, "cheap", "Muon"),
    ("bf16-mixed", True, "none", "AdamW"),
)
"""Further combinations of values with which every layout is trained. PLAIN, SETTINGS and FLOAT8 together use all of AXES."""
FLOAT8 = ("float8", True, "none", "AdamW")
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2**-7, "bf16-true": 2**-7, "float8": 2**-6}
"""{precision: relative tolerance of a loss}. fp32: sums in another order over 20 steps. bf16: two units of its 8 bits."""


def layouts(devices: int) -> dict[str, dict[str, Any]]:
    """Return {name of a layout of `devices` devices: arguments of `training.train`, with the keys strategy and size}.

    Layouts with "experts" in the name have a mixture-of-experts model.
    """
    sparse: dict[str, Any] = {"size": "experts"}
    if devices == 1:
        return {"one": {"strategy": "auto"}, "one-experts": {"strategy": "auto", **sparse}}
    strategies: dict[str, Any] = {
        "ddp": "ddp",
        "fsdp2": {"shard": devices},
        "replicas": {"replicate": devices, "shard": 1},
        "tp": {"shard": 1, "tensor_parallel": devices},
        "context": {"shard": 1, "context": devices},
        "heads": {"shard": 1, "context": devices, "context_attention": "heads"},
    }
    if devices % 2 == 0:
        strategies["pp"] = {"shard": devices // 2, "pipeline": 2}
        if devices > 2:
            strategies["hsdp"] = {"replicate": 2, "shard": devices // 2}
            strategies["fsdp2-tp"] = {"shard": devices // 2, "tensor_parallel": 2}
            strategies["fsdp2-context"] = {"shard": devices // 2, "context": 2}
    with_experts: dict[str, Any] = {"fsdp2-experts": {"shard": devices}, "experts": {"shard": devices, "expert": devices}}
    if devices % 2 == 0 and devices > 2:
        with_experts["experts-tp"] = {"shard": devices // 2, "tensor_parallel": 2, "expert": devices // 2}
    return {name: {"strategy": strategy} for name, strategy in strategies.items()} | {
        name: {"strategy": strategy, **sparse} for name, strategy in with_experts.items()
    }


def cells(devices: int, *, float8: bool) -> dict[str, dict[str, Any]]:
    """Return {name of a check: job with the arguments of `training.train`} for each layout and each combination of values.

    Jobs with the values PLAIN (fp32, eager, no recomputation, AdamW) come first, so that they fit into a small time budget.
    """
    jobs = {}
    for values in [PLAIN, *SETTINGS, *([FLOAT8] if float8 else [])]:
        cell = dict(zip(AXES, values, strict=True))
        for layout, job in layouts(devices).items():
            if not (cell["compile"] and "expert" in job["strategy"]):  # refused: `layout_problems`
                mode = "compiled" if cell["compile"] else "eager"
                words = (layout, cell["precision"], mode, cell["activation_checkpointing"], cell["optimizer"])
                jobs["losses/" + "/".join(words)] = {"do": "train", **job, **cell}
    return jobs
