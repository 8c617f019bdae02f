"""Tensors taken out of nested dicts and lists, and put back: placeholders say which tensor was where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PLACEHOLDER = "sharded tensor"
"""Key of the dict that replaces a tensor; its value is the tensor's name: the keys that lead to it, joined by dots."""


class Placeholder:
    """The name, shape and dtype of a tensor that was taken out."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.name: str = content[PLACEHOLDER]
        self.shape = torch.Size(content["shape"])
        self.dtype: torch.dtype = getattr(torch, content["dtype"])


def is_placeholder(tree: Any) -> bool:
    return isinstance(tree, dict) and PLACEHOLDER in tree


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every value in nested dicts and lists. A placeholder is one value."""
    if is_placeholder(tree) or not isinstance(tree, Mapping | list | tuple):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def placeholders_in(tree: Any) -> Iterator[Placeholder]:
    """The placeholders of `tree`, in its order."""
    return (Placeholder(value) for _, value in leaves(tree) if is_placeholder(value))


def replaced(tree: Any, leaf: Callable[[str, Any], Any], name: str = "") -> Any:
    """`tree` with `leaf(name, value)` instead of each value in nested dicts and lists. A placeholder is one value."""
    if isinstance(tree, dict) and not is_placeholder(tree):
        return {key: replaced(value, leaf, f"{name}.{key}" if name else str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, leaf, f"{name}.{i}") for i, value in enumerate(tree)]
    return leaf(name, tree)


def take_out(tree: Any, plain: Callable[[str], bool]) -> tuple[Any, dict[str, Tensor]]:
    """Take tensors out of `tree`: all distributed ones, and plain ones if `plain` is true of the name.

    Returns:
        The tree with placeholders, and the tensors by name.
    """
    tensors: dict[str, Tensor] = {}

    def leaf(name: str, value: Any) -> Any:
        if not (isinstance(value, DTensor) or (isinstance(value, Tensor) and plain(name))):
            return value
        tensors[name] = value
        return {PLACEHOLDER: name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    return replaced(tree, leaf), tensors


def put_in(tree: Any, tensor_of: Callable[[Placeholder], Any]) -> Any:
    """`tree` with the result of `tensor_of` in the place of each placeholder."""
    return replaced(tree, lambda name, value: tensor_of(Placeholder(value)) if is_placeholder(value) else value)
