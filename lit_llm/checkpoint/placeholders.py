"""Tensors taken out of nested dicts and lists, and put back: placeholders say which tensor was where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PLACEHOLDER = "sharded tensor"
"""Key of the dict that replaces a tensor; its value is the tensor's name: the keys that lead to it, joined by dots."""


def take_out(tree: Any, name: str, tensors: dict[str, Tensor], *, plain: bool) -> Any:
    """`tree` with a placeholder instead of each distributed tensor, and if `plain` also of each other tensor.

    Args:
        name: that of `tree`.
        tensors: what is taken out is added here, by name.
    """
    if isinstance(tree, DTensor) or (plain and isinstance(tree, Tensor)):
        tensors[name] = tree
        return {PLACEHOLDER: name, "shape": list(tree.shape), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, dict):
        return {key: take_out(value, f"{name}.{key}", tensors, plain=plain) for key, value in tree.items()}
    if isinstance(tree, list):
        return [take_out(value, f"{name}.{i}", tensors, plain=plain) for i, value in enumerate(tree)]
    return tree


class Placeholder:
    """The name, shape and dtype of a tensor that was taken out."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.name: str = content[PLACEHOLDER]
        self.shape = torch.Size(content["shape"])
        self.dtype: torch.dtype = getattr(torch, content["dtype"])


def is_placeholder(tree: Any) -> bool:
    return isinstance(tree, dict) and PLACEHOLDER in tree


def put_in(tree: Any, tensor_of: Callable[[Placeholder], Any]) -> Any:
    """`tree` with what `tensor_of` gives instead of each placeholder."""
    if is_placeholder(tree):
        return tensor_of(Placeholder(tree))
    if isinstance(tree, dict):
        return {key: put_in(value, tensor_of) for key, value in tree.items()}
    if isinstance(tree, list):
        return [put_in(value, tensor_of) for value in tree]
    return tree


def placeholders_in(tree: Any) -> Iterator[Placeholder]:
    """In the order of `tree`."""
    if is_placeholder(tree):
        yield Placeholder(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from placeholders_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from placeholders_in(value)
