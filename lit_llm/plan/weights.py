"""A weight of a model, and the bytes that many of them take: stored, as gradients, and as FSDP2 gathers and reduces them."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any


class Key(Hashable):
    """A configuration as a key of a cache. Two are equal if they are written equally."""

    def __init__(self, value: Any) -> None:
        self.value, self.text = value, repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        part: one of PARTS; of a custom model, a child of the module.
        group: the optimizer's (`lit_llm.optim.parameter_groups`). None: frozen.
        times: number of blocks that have it; 0 outside of the blocks, where it exists once.
        own_bytes: of an element in fp32 precision, where the model itself chooses the type.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    group: str | None
    times: int = 0
    own_bytes: int = 4

    @property
    def copies(self) -> int:
        return self.times or 1

    @property
    def total(self) -> int:
        """Elements of all copies."""
        return math.prod(self.shape) * self.copies

    def itemsize(self, parameter_bytes: int) -> int:
        """Bytes of an element, where most weights have `parameter_bytes`: adapters stay in fp32."""
        return self.own_bytes if parameter_bytes == 4 or self.part == "adapters" else parameter_bytes


def stored_bytes(weights: tuple[Weight, ...], parameter_bytes: int, *, trainable: bool = False) -> int:
    """Bytes of the weights, or of those that get gradients and optimizer state."""
    return sum(w.total * w.itemsize(parameter_bytes) for w in weights if w.group is not None or not trainable)


def average_bytes(weights: tuple[Weight, ...]) -> int:
    """Bytes of the average of the trained weights, which is fp32 in every precision."""
    return sum(4 * w.total for w in weights if w.group is not None)


def blocks_apart(weights: tuple[Weight, ...]) -> list[tuple[Weight, ...]]:
    """The weights of each block, once; of equal blocks, one."""
    found: dict[str, list[Weight]] = {}
    for weight in weights:
        if block := re.match(r"(network\.)?blocks\.\d+", weight.name):
            found.setdefault(block[0], []).append(replace(weight, times=1))
    return [tuple(block) for block in found.values()]


def gradient_bytes(weights: tuple[Weight, ...], parameter_bytes: int, tensor_parallel: int = 1) -> int:
    """Bytes of the gradients of one of `tensor_parallel` ranks. That of an embedding that is not the head is whole."""
    split = tensor_parallel > 1 and any(weight.part == "output head" for weight in weights)
    embedding = tuple(weight for weight in weights if split and weight.part == "token embedding")
    more = (tensor_parallel - 1) * stored_bytes(embedding, parameter_bytes, trainable=True)
    return stored_bytes(weights, parameter_bytes, trainable=True) + more


def gathered_bytes(weights: tuple[Weight, ...], parameter_bytes: int, compute_bytes: int) -> tuple[int, int]:
    """Bytes of the blocks' weights, and of all others, as FSDP2 gathers them: linear layers in the compute dtype."""

    def size(weight: Weight) -> int:
        own = weight.itemsize(parameter_bytes)
        linear = weight.part in ("attention", "mlp", "biases", "adapters", "output head")
        return weight.total * (min(own, compute_bytes) if linear else own)

    blocks, others = (sum(size(w) for w in weights if bool(w.times) == within) for within in (True, False))
    return blocks, others


def reduced_bytes(weights: tuple[Weight, ...]) -> int:
    """Bytes of the whole gradients as FSDP2 reduces them: in fp32."""
    return 4 * sum(weight.total for weight in weights if weight.group is not None)


def parameters_by_group(weights: tuple[Weight, ...]) -> dict[str, int]:
    """Trainable parameters by optimizer group: matrix (hidden weights), embedding, vector; with LoRA adapter."""
    found = {"matrix": 0, "embedding": 0, "vector": 0}
    for weight in weights:
        if weight.group is not None:
            found[weight.group] = found.get(weight.group, 0) + weight.total
    return found
