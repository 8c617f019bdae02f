"""Names that classes had in version 0.1 before the folders of today, so that old recipes and run folders keep working."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Container
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

# File in callbacks/ → its public classes, by their old names.
_CALLBACKS = {
    "batch_ramp": ("BatchRamp",),
    "checkpoint": ("StepCheckpoint",),
    "counter_seed": ("CounterSeed",),
    "ddp_buckets": ("SettledBuckets",),
    "gradient_norm": ("GradientNorm",),
    "profile": ("Profile",),
    "progress_bar": ("TrainingProgress",),
    "samples": ("TextSamples",),
    "schedule": ("Constant", "Cosine", "Decay", "InverseSquareRoot", "Linear", "Schedule", "WSD"),
    "spike_guard": ("SpikeGuard",),
    "stop_on_signal": ("StopOnSignal",),
    "stragglers": ("Stragglers",),
    "tensorboard_page": ("TensorBoardPage",),
    "throughput": ("Throughput",),
    "time_breakdown": ("TimeBreakdown",),
    "validation": ("ValidateEvery",),
}
_RENAMED_CALLBACKS = {"CounterSeed": "StepSeed", "SettledBuckets": "DDPBucketWarmup"}

RENAMED = {
    "lit_llm.ddp_reduction.reduce_in_fp32": "lit_llm.distributed.ddp.reduce_in_fp32",
    **{
        f"lit_llm.data.tokenizer.{name}": f"lit_llm.tokenizers.{name}"
        for name in ("BPE", "Bytes", "Characters", "TokenizerJSON", "load_tokenizer")
    },
    "lit_llm.loss_scaling.loss_scaling": "lit_llm.distributed.loss_scaling.loss_scaling",
    "lit_llm.optimizers.Lion": "lit_llm.optim.Lion",
    "lit_llm.optimizers.MuonAdamW": "lit_llm.optim.MuonAdamW",
    "lit_llm.plan_watch.PlanWatch": "lit_llm.training.plan_monitor.PlanMonitor",
    "PlanWatch": "lit_llm.training.plan_monitor.PlanMonitor",
    "lit_llm.strategies.MeshStrategy": "lit_llm.distributed.mesh_strategy.MeshStrategy",
    **{old: f"lit_llm.callbacks.{new}" for old, new in _RENAMED_CALLBACKS.items()},
}
"""Old name → name of today."""

for _file, _names in _CALLBACKS.items():
    for _name in _names:
        _today = f"lit_llm.callbacks.{_RENAMED_CALLBACKS.get(_name, _name)}"
        RENAMED |= {f"callbacks.{_name}": _today, f"callbacks.{_file}.{_name}": _today}


def current_name(name: str, *, needs_ours: bool = True) -> str:
    """The name of today for a class path; any other string is returned as it is.

    `callbacks` may also be a package of the user's project. A class there keeps its name.

    Args:
        needs_ours: The key accepts only classes that extend one of lit_llm's callbacks. A class of the user's project that
            does not, such as a copy of ours, is then replaced by ours, with a warning.
    """
    today = RENAMED.get(name)
    if today is None or not name.startswith("callbacks."):
        return today or name
    users = _class_in_users_project(name)
    if users is None:
        return today
    extends_ours = any(base.__module__.startswith("lit_llm.callbacks") for base in getattr(users, "__mro__", ()))
    if extends_ours or not needs_ours:
        return name
    warnings.warn(
        f"{name} of this project does not extend a class of lit_llm.callbacks; {today} is used instead.", stacklevel=2
    )
    return today


def with_current_names(tree: Any, groups: Container[str], key: str = "") -> Any:
    """A parsed YAML tree in which every old name of a class or function has been replaced.

    Args:
        groups: Top-level keys that accept only classes that extend one of lit_llm's callbacks.
        key: Top-level key that `tree` is the value of.
    """
    if isinstance(tree, dict):
        return {name: with_current_names(value, groups, key or str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [with_current_names(value, groups, key) for value in tree]
    return current_name(tree, needs_ours=key in groups) if isinstance(tree, str) else tree


def _class_in_users_project(name: str) -> Any:
    """The object that `name` imports, unless `callbacks` is this repository's own folder; None if there is none."""
    found = importlib.util.find_spec("callbacks")
    ours = Path(__file__).parent / "callbacks"
    if found is None or any(Path(folder).resolve() == ours.resolve() for folder in found.submodule_search_locations or ()):
        return None
    try:
        return locate(name)
    except ErrorDuringImport:
        return object()  # the parser reports why the user's module cannot be imported
