"""The weights of a model, counted by part and by group of the optimizer, and the bytes that many of them take.

They are those of the built model, of which one block of each kind, with and without experts, is built without memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from lit_llm.models.config import GPTConfig

if TYPE_CHECKING:  # imports torch
    from torch import Tensor

    from lit_llm.models.custom import Architecture, CustomModel
    from lit_llm.models.gpt import GPT
    from lit_llm.models.lora import LoRAConfig

P = ParamSpec("P")
R = TypeVar("R")
_MOST_RESULTS = 1024


def cached_by_text(function: Callable[P, R]) -> Callable[P, R]:
    """Keep results of a function of configurations, which are not hashable: arguments are equal if they are written equally."""
    known: dict[str, R] = {}

    @functools.wraps(function)
    def cached(*args: P.args, **options: P.kwargs) -> R:
        key = repr((args, options))
        if key not in known:
            found = function(*args, **options)
            if len(known) >= _MOST_RESULTS:
                known.pop(next(iter(known)))
            known[key] = found
        return known[key]

    cached.cache_clear = known.clear  # type: ignore[attr-defined]
    return cached


PARTS = (
    *("token embedding", "position embedding", "attention", "convolutions", "mlp", "router", "experts", "input ahead"),
    *("norms", "biases", "adapters", "output head"),
)


@dataclass(frozen=True)
class OwnModel:
    """A user's class, planned in the place of a `GPTConfig`: it has these settings only."""

    architecture: Architecture
    block_size: int = GPTConfig.block_size
    vocab_size: int | None = None
    eos_id: int | None = None

    @property
    def padded_vocab_size(self) -> int:
        """Of the logits, which are not padded."""
        assert self.vocab_size is not None
        return self.vocab_size


PlannedModel: TypeAlias = GPTConfig | OwnModel


def planned_model(model: GPTConfig, architecture: Architecture | None) -> PlannedModel:
    """`model`, or an architecture with what it takes from `model`."""
    return model if architecture is None else OwnModel(architecture, model.block_size, model.vocab_size, model.eos_id)


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        part: one of PARTS; of a user's model, a child of the module.
        group: the optimizer's (`lit_llm.optim.parameter_groups`). None: frozen.
        times: number of blocks that have it; 0 outside of the blocks, where it exists once.
        own_bytes: of an element in fp32 precision, where the model itself chooses the type.
        experts: of a stack of matrices: their number in the whole model. 0: another weight.
        held: where a rank has 1 / n of the elements of other weights, it has held / n of these (`RunSettings.weights`).
        ahead: of a block that predicts ahead.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    group: str | None
    times: int = 0
    own_bytes: int = 4
    experts: int = 0
    held: float = 1.0
    ahead: bool = False

    @property
    def copies(self) -> int:
        return self.times or 1

    @property
    def total(self) -> int:
        """Elements of all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def split(self) -> float:
        """Elements of all copies, before they are divided by the ranks that share other weights."""
        return self.total * self.held

    def itemsize(self, parameter_bytes: int) -> int:
        """Bytes of an element, where most weights have `parameter_bytes`: adapters stay in fp32."""
        return self.own_bytes if parameter_bytes == 4 or self.part == "adapters" else parameter_bytes


Weights: TypeAlias = tuple[Weight, ...]


@cached_by_text
def weights_of(model: PlannedModel, lora: LoRAConfig | None = None, ranks: int = 1, expert: int = 1) -> Weights:
    """The parameters on one of `ranks` tensor-parallel ranks, in the model's order. A tied matrix is counted once.

    Args:
        expert: ranks that share the experts of a layer.
    """
    from lit_llm.optim import parameter_groups
    from lit_llm.plan.built_model import build_gpt, build_own, local_config, with_layers

    if isinstance(model, OwnModel):
        built: GPT | CustomModel = build_own(model.architecture, model.vocab_size)
        part_of, blocks, ahead = _child, list[int](), 0
    else:
        part_of = _part
        have_experts = [model.layer(i).experts for i in range(model.n_layer)]
        kinds, ahead = list(dict.fromkeys(have_experts)), model.predict_ahead
        blocks = [have_experts.count(kind) for kind in kinds] + [1] * ahead
        built = build_gpt(with_layers(local_config(model, ranks), [have_experts.index(kind) for kind in kinds]), lora)
    alike = {"projection": "matrix", "head": "embedding"}  # they differ in their rates only
    groups = {id(p): alike.get(name := str(group["name"]), name) for group in parameter_groups(built) for p in group["params"]}

    stacked = {p for m in built.modules() if getattr(m, "is_stacked", False) for p in m.parameters(recurse=False)}

    def shape(p: Tensor) -> tuple[int, ...]:
        return (p.shape[0] // expert, *p.shape[1:]) if p in stacked else tuple(p.shape)

    def times(name: str) -> int:
        if _block(name) is None:
            return 0
        return blocks[int(name.split(".")[1])] if blocks else 1

    def is_ahead(name: str) -> bool:
        return bool(ahead) and _block(name) is not None and int(name.split(".")[1]) >= len(blocks) - ahead

    return tuple(
        Weight(
            name,
            shape(p),
            part_of(name, p.ndim),
            groups.get(id(p)),
            times(name),
            p.element_size(),
            len(p) if p in stacked else 0,
            ahead=is_ahead(name),
        )
        for name, p in built.named_parameters()
    )


def _block(name: str) -> str | None:
    """The block that a parameter belongs to."""
    found = re.match(r"(network\.)?blocks\.\d+", name)
    return found and found[0]


def _child(name: str, dimensions: int) -> str:
    return ".".join(name.split(".")[:2])


def _part(name: str, dimensions: int) -> str:
    first, *_, last = name.split(".")
    if "lora" in last:
        return "adapters"
    if "norm" in name:
        return "norms"
    if "convolution" in name:
        return "convolutions"
    if last == "bias":
        return "biases"
    if ".mlp.router." in name:
        return "router"
    if dimensions == 3:  # E matrices
        return "experts"
    if ".ahead." in name:
        return "input ahead"
    outside = {"embedding": "token embedding", "positions": "position embedding", "head": "output head"}
    return outside.get(first, "attention" if ".attention." in name else "mlp")


@cached_by_text
def buffer_bytes(model: OwnModel, parameter_bytes: int) -> int:
    """Bytes of the buffers of a user's module."""
    from lit_llm.plan.built_model import build_own

    buffers = list(build_own(model.architecture, model.vocab_size).buffers())
    narrow = parameter_bytes < 4  # floating-point buffers get the type of the weights
    return sum(b.numel() * (parameter_bytes if narrow and b.is_floating_point() else b.element_size()) for b in buffers)


def parameters(model: PlannedModel, lora: LoRAConfig | None = None) -> dict[str, int]:
    """Parameters by part, exactly as in the built model. A tied head is counted with the embedding.

    A Llama-like block with multi-head attention, no biases, a 2-matrix MLP and f = 4d has 12d² + 2d parameters. The whole
    model with a tied head has 12Ld² + 2Ld + Vd + d (Kaplan et al. 2020, table 1, plus norms).
    """
    found = Counter[str]()
    for weight in weights_of(model, lora):
        found[weight.part] += weight.total
    return {part: found[part] for part in dict.fromkeys((*PARTS, *found)) if found[part]}


def total_parameters(model: PlannedModel, lora: LoRAConfig | None = None, ranks: int = 1) -> int:
    """All parameters, or those on one of `ranks` tensor-parallel ranks. A tied matrix counts once.

    Matrices, the biases of their output columns, embedding and head are split. Norms, positions and the biases of the two
    output projections are not.
    """
    return sum(weight.total for weight in weights_of(model, lora, ranks))


# -- bytes of many weights --------------------------------------------------------------------------------------------


def stored_bytes(weights: Weights, parameter_bytes: int, *, trainable: bool = False) -> int:
    """Bytes of the weights, or of those that get gradients and optimizer state, before ranks share them."""
    return int(sum(w.split * w.itemsize(parameter_bytes) for w in weights if w.group is not None or not trainable))


def average_bytes(weights: Weights) -> int:
    """Bytes of the average of the trained weights, which is fp32 in every precision, before ranks share it."""
    return int(sum(4 * w.split for w in weights if w.group is not None))


def reduced_bytes(weights: Weights) -> int:
    """Bytes of the whole gradients as FSDP2 reduces them: in fp32, too."""
    return sum(4 * w.total for w in weights if w.group is not None)


def whole_gradient_bytes(weights: Weights, parameter_bytes: int) -> int:
    """Bytes of the gradients that a rank computes, before they are reduced."""
    return sum(w.total * w.itemsize(parameter_bytes) for w in weights if w.group is not None)


def is_tied(weights: Weights) -> bool:
    """Whether the token embedding is the output head."""
    return not any(weight.part == "output head" for weight in weights)


def gradient_bytes(weights: Weights, parameter_bytes: int, tensor_parallel: int = 1) -> int:
    """Bytes of the gradients of one of `tensor_parallel` ranks. That of an embedding that is not the head is whole."""
    split = tensor_parallel > 1 and not is_tied(weights)
    embedding = tuple(weight for weight in weights if split and weight.part == "token embedding")
    more = (tensor_parallel - 1) * stored_bytes(embedding, parameter_bytes, trainable=True)
    return stored_bytes(weights, parameter_bytes, trainable=True) + more


def gathered_bytes(weights: Weights, parameter_bytes: int, compute_bytes: int) -> tuple[int, int]:
    """Bytes of the blocks' weights, and of all others, as FSDP2 gathers them: linear layers in the compute dtype."""

    def size(weight: Weight) -> int:
        own = weight.itemsize(parameter_bytes)
        linear = weight.part in ("attention", "mlp", "experts", "biases", "adapters", "output head")
        return weight.total * (min(own, compute_bytes) if linear else own)

    blocks, others = (sum(size(w) for w in weights if bool(w.times) == within) for within in (True, False))
    return blocks, others


def gathered_groups(weights: Weights, *, tied: bool) -> tuple[Weights, Weights, Weights, int]:
    """What FSDP2 gathers at a time: the largest block, the root (last norm and head), the embedding; and the number of blocks.

    `tied`: the embedding belongs to the root.
    """
    blocks: dict[str, list[Weight]] = {}
    for weight in weights:
        if block := _block(weight.name):
            blocks.setdefault(block, []).append(replace(weight, times=1))
    outside = [weight for weight in weights if not _block(weight.name)]
    largest = max(map(tuple, blocks.values()), key=lambda each: stored_bytes(each, 4), default=())
    embedding = () if tied else tuple(weight for weight in outside if weight.part == "token embedding")
    root = tuple(weight for weight in outside if weight not in embedding)
    return largest, root, embedding, max(1, block_count(weights))


def block_count(weights: Weights) -> int:
    """Blocks that have these weights: those of each kind, by the name of the one that was built."""
    return sum({_block(w.name): w.times for w in weights if w.times}.values())
