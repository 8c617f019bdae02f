"""Takes tensors out of nested dicts and lists, leaving a placeholder in the position of each, and puts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PLACEHOLDER = "sharded tensor"
"""Key of a dict that replaces a tensor. Under this key is the tensor's name: the keys that lead to it, joined by dots."""


class Placeholder:
    """Record of the name, shape and dtype of a tensor taken out of a nested dict. `content`: the dict that is in its place."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.name: str = content[PLACEHOLDER]
        self.shape = torch.Size(content["shape"])
        self.dtype: torch.dtype = getattr(torch, content["dtype"])


def is_placeholder(tree: Any) -> bool:
    return isinstance(tree, dict) and PLACEHOLDER in tree


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for every leaf of nested dicts and lists. A placeholder is one leaf. `name`: the name of `tree`."""
    if is_placeholder(tree) or not isinstance(tree, Mapping | list | tuple):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def placeholders_in(tree: Any) -> Iterator[Placeholder]:
    """Yield the placeholders in nested dicts and lists, in the order of their keys and indices."""
    return (Placeholder(value) for _, value in leaves(tree) if is_placeholder(value))


def replaced(tree: Any, leaf: Callable[[str, Any], Any], name: str = "") -> Any:
    """A copy of nested dicts and lists with `leaf(name, value)` in place of each leaf. A placeholder is one leaf."""
    if isinstance(tree, dict) and not is_placeholder(tree):
        return {key: replaced(value, leaf, f"{name}.{key}" if name else str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, leaf, f"{name}.{i}") for i, value in enumerate(tree)]
    return leaf(name, tree)


def take_out(tree: Any, plain: Callable[[str], bool]) -> tuple[Any, dict[str, Tensor]]:
    """Take tensors out of nested dicts and lists: every DTensor, and each plain tensor for whose name `plain` returns True.

    Returns:
        (copy of `tree` with placeholders, name → tensor).
    """
    tensors: dict[str, Tensor] = {}

    def leaf(name: str, value: Any) -> Any:
        if not (isinstance(value, DTensor) or (isinstance(value, Tensor) and plain(name))):
            return value
        tensors[name] = value
        return {PLACEHOLDER: name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    return replaced(tree, leaf), tensors


def put_in(tree: Any, tensor_of: Callable[[Placeholder], Any]) -> Any:
    """A copy of `tree`, nested dicts and lists, with `tensor_of(placeholder)` in place of each placeholder."""
    return replaced(tree, lambda name, value: tensor_of(Placeholder(value)) if is_placeholder(value) else value)
