"""Rules for the values in a checkpoint. Checksums find only damage: another program's file can have wrong values."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

from lit_llm.checkpoint.placeholders import PLACEHOLDER, is_placeholder, leaves


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value fits `kind`: int (a whole number from 0 on), dict (with str keys), another class (an instance), {key:
    kind} (a dict with these keys), [kind] (a list of such elements), or a function that returns whether the value fits."""
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    if kind is dict:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if isinstance(kind, dict):
        return _fits(value, dict) and all(_fits(value.get(name), each) for name, each in kind.items())
    if isinstance(kind, list):
        return isinstance(value, list | tuple) and all(_fits(each, kind[0]) for each in value)
    return isinstance(value, kind) if isinstance(kind, type) else kind(value)


def is_of(value: Any, hint: Any) -> bool:
    """Whether a plain value has the type `hint`, the annotation of a dataclass field. Elements of lists are not checked."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return value in options
    if get_origin(hint) in (Union, UnionType):
        return any(is_of(value, option) for option in options)
    if hint in (bool, int, float, str, NoneType):
        return type(value) is hint or (hint is float and type(value) is int)
    return isinstance(value, Mapping | list | tuple)


def _is_optimizer_state(value: Any) -> bool:
    """Whether a value has the form of an optimizer's state_dict. Its keys `state` and `param_groups` may be missing."""
    if not _fits(value, dict):
        return False
    states, groups = value.get("state", {}), value.get("param_groups", [])
    return (
        isinstance(states, Mapping)
        and _fits(groups, [{"params": list}])
        and all(isinstance(group.get("lr", 0.0), int | float | Tensor) for group in groups)
        and all(isinstance(number, int | str) and _fits(state, dict) for number, state in states.items())
        and (not groups or states.keys() <= {number for group in groups for number in group["params"]})
    )


def _are_weights(value: Any) -> bool:
    return _fits(value, dict) and all(isinstance(each, Tensor) or is_placeholder(each) for each in value.values())


_SCHEMA: dict[str, tuple[Any, str]] = {  # key → (kind for `_fits`, description); callbacks and data modules have other keys
    **dict.fromkeys(("global_step", "epoch", "tokens"), (int, "a whole number from 0 on")),
    **dict.fromkeys(
        ("callbacks", "loops", "settings", "model_config", "lora"),
        (lambda value: _fits(value, dict) and len(value) <= 10_000, "a dict with at most 10,000 texts as keys"),
    ),
    **dict.fromkeys(("state_dict", "ema_state_dict"), (_are_weights, "tensors by their names")),
    **dict.fromkeys(("optimizer_class", "tokenizer_sha256"), (str, "a text")),
    "pytorch-lightning_version": (lambda value: isinstance(value, str) and value[:1].isdigit(), "a version"),
    "base": ({"path": str, "sha256": str}, "a dict with the texts path and sha256"),
    "prompt_start": ([int], "a list of ids"),
    "lr_schedulers": ([dict], "a list of dicts"),
    "optimizer_states": ([_is_optimizer_state], "a list of states as torch's optimizers give them"),
}  # fmt: skip


def content_problem(content: Mapping[Any, Any], *, has_data: bool) -> str | None:
    """The first problem in a checkpoint's values, as the end of a sentence; None if all values are valid.

    Args:
        has_data: whether tensors must have data. False: the checkpoint was loaded to the meta device.
    """
    if not _fits(content, dict):
        return "has keys that are no texts"
    for key, (kind, words) in _SCHEMA.items():
        if key in content and not _fits(content[key], kind):
            shown = repr(content[key]) if isinstance(content[key], int | float | str | None) else type(content[key]).__name__
            return f"has the {key} {shown[:40]}, which must be {words}"
    for name, tensor in leaves(content):
        if isinstance(tensor, Tensor) and not _has_values(tensor, meta=not has_data):
            return f"has the tensor {name[:80]} without values (sparse, or on the meta device)"
        if is_placeholder(tensor) and not _is_placeholder_of_a_tensor(tensor):
            return f"has a malformed placeholder for the tensor {name[:80]}"
    return _progress_problem("loops", content.get("loops", {}))


def _progress_problem(where: str, loops: Mapping[Any, Any]) -> str | None:
    """The first problem in counters of Lightning's loops, as a sentence's end; None if all are valid. `where`: dotted key."""
    for name, value in loops.items():
        here, is_counted = f"{where}.{name}", where.endswith((".total", ".current")) or name == "_batches_that_stepped"
        if is_counted and not _fits(value, int):
            return f"has the {here} {str(value)[:40]!r}, which must be a whole number from 0 on"
        if name == "is_last_batch" and not isinstance(value, bool):
            return f"has the {here} {str(value)[:40]!r}, which must be true or false"
        if name in ("total", "current") and not isinstance(value, Mapping):
            return f"has the {here} {str(value)[:40]!r}, which must be a dict of numbers"
        if isinstance(value, Mapping) and (problem := _progress_problem(here, value)):
            return problem
    return None


def part_problem(parts: Any) -> str | None:
    """The first problem in a shard, a dict name → {"offset", "part"}, as the end of a sentence; None if the shard is valid."""
    for name, part in parts.items():
        is_part = isinstance(name, str) and _fits(part, {"offset": [int], "part": Tensor})
        if not (is_part and _has_values(part["part"]) and len(part["offset"]) == part["part"].ndim):
            return f"has no part of a tensor under {str(name)[:80]!r}"
    return None


def _is_placeholder_of_a_tensor(tree: Any) -> bool:
    is_described = _fits(tree, {PLACEHOLDER: str, "dtype": str, "shape": [int]})
    return is_described and isinstance(getattr(torch, tree["dtype"], None), torch.dtype)


def _has_values(tensor: Tensor, *, meta: bool = False) -> bool:
    return tensor.layout is torch.strided and (meta or not tensor.is_meta)
