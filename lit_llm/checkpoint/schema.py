"""What a checkpoint's values may be. Checksums tell damage, not content: a file from elsewhere can be intact and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_llm.checkpoint.placeholders import PLACEHOLDER, is_placeholder


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _is_optimizer_state(value: Any) -> bool:
    """As `torch.optim.Optimizer.state_dict` gives it, as far as it is there: state by parameter, and groups of parameters."""
    if not _is_named(value):
        return False
    states, groups = value.get("state", {}), value.get("param_groups", [])
    return (
        isinstance(states, Mapping)
        and isinstance(groups, list)
        and all(_is_named(group) and isinstance(group.get("params"), list) for group in groups)
        and all(isinstance(number, int | str) and _is_named(state) for number, state in states.items())
        and (not groups or states.keys() <= {number for group in groups for number in group["params"]})
    )


class _Kind(NamedTuple):
    check: Callable[[Any], bool]
    words: str


_COUNT, _TEXT = _Kind(_is_count, "a whole number from 0 on"), _Kind(_is_text, "a text")
_NAMED = _Kind(_is_named, "a dict with texts as keys")
_KINDS = {  # of Lightning's keys and ours; others belong to callbacks and data modules
    **dict.fromkeys(("global_step", "epoch", "tokens"), _COUNT),
    **dict.fromkeys(("state_dict", "ema_state_dict", "callbacks", "loops", "settings", "model_config", "lora"), _NAMED),
    **dict.fromkeys(("optimizer_class", "tokenizer_sha256"), _TEXT),
    "pytorch-lightning_version": _Kind(lambda value: _is_text(value) and value[:1].isdigit(), "a version"),
    "base": _Kind(lambda value: _is_named(value) and {"path", "sha256"} <= value.keys() and all(map(_is_text, value.values())),
                  "a dict with the texts path and sha256"),
    "prompt_start": _Kind(_is_list_of(_is_count), "a list of ids"),
    "lr_schedulers": _Kind(_is_list_of(_is_named), "a list of dicts"),
    "optimizer_states": _Kind(_is_list_of(_is_optimizer_state), "a list of states as torch's optimizers give them"),
}  # fmt: skip


def content_problem(content: Mapping[Any, Any], *, has_data: bool) -> str | None:
    """What is wrong with a checkpoint's values, as the end of a sentence; None if nothing is.

    Args:
        has_data: tensors were not read to the meta device.
    """
    if not _is_named(content):
        return "has keys that are no texts"
    for key, kind in _KINDS.items():
        if key in content and not kind.check(content[key]):
            shown = repr(content[key]) if isinstance(content[key], int | float | str | None) else type(content[key]).__name__
            return f"has the {key} {shown[:40]}, which must be {kind.words}"
    for name, tensor in _leaves([content]):
        if isinstance(tensor, Tensor) and (tensor.layout is not torch.strided or (has_data and tensor.is_meta)):
            return f"has the tensor {name[:80]} without values (sparse, or on the meta device)"
        if is_placeholder(tensor) and not _is_placeholder_of_a_tensor(tensor):
            return f"has a malformed placeholder for the tensor {name[:80]}"
    return None


def part_problem(parts: Any) -> str | None:
    """What is wrong with the content of a shard, as the end of a sentence; None if nothing is."""
    for name, part in parts.items():
        box, values = (part.get("offset"), part.get("part")) if isinstance(part, Mapping) else (None, None)
        is_tensor = isinstance(values, Tensor) and values.layout is torch.strided and not values.is_meta
        if not (_is_text(name) and is_tensor and _is_list_of(_is_count)(box) and len(box) == values.ndim):  # type: ignore[arg-type,union-attr]
            return f"has no part of a tensor under {str(name)[:80]!r}"
    return None


def _is_placeholder_of_a_tensor(tree: Any) -> bool:
    dtype = getattr(torch, tree["dtype"], None) if _is_text(tree.get("dtype")) else None
    return isinstance(dtype, torch.dtype) and _is_text(tree[PLACEHOLDER]) and _is_list_of(_is_count)(tree.get("shape"))


def _leaves(trees: Iterable[Any], name: str = "") -> Iterable[tuple[str, Any]]:
    """(name, value) of everything in nested dicts and lists that is neither, and of placeholders."""
    waiting, seen = [(name, tree) for tree in trees], set[int]()
    while waiting:  # not recursive: a tampered tree may be deep, or contain itself
        where, tree = waiting.pop()
        if is_placeholder(tree) or not isinstance(tree, Mapping | list | tuple):
            yield where, tree
            continue
        if id(tree) in seen:
            continue
        seen.add(id(tree))
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        waiting += [(f"{where}.{key}" if where else str(key), value) for key, value in items]
