"""The parameters of a model on the meta device: their part of the model, their optimizer group, and sums of their bytes."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from lit_llm.distributed.pipeline_order import StageShare
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
    """Decorate `function` to cache its results. Arguments, such as unhashable configurations, are equal if their `repr` is."""
    known: dict[str, R] = {}

    @functools.wraps(function)
    def cached(*args: P.args, **options: P.kwargs) -> R:
        key = repr((args, options))
        if key not in known:
            if len(known) >= _MOST_RESULTS:
                known.pop(next(iter(known)))
            known[key] = function(*args, **options)
        return known[key]

    cached.cache_clear = known.clear  # type: ignore[attr-defined]
    return cached


PARTS = (
    *("token embedding", "position embedding", "attention", "convolutions", "mlp", "router", "experts", "input ahead"),
    *("norms", "biases", "adapters", "output head"),
)


@dataclass(frozen=True)
class OwnModel:
    """Record of the settings of a user's own model class. In a plan, an `OwnModel` takes the place of a `GPTConfig`."""

    architecture: Architecture
    block_size: int = GPTConfig.block_size
    vocab_size: int | None = None
    eos_id: int | None = None

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size: logits of a user's model are not padded."""
        assert self.vocab_size is not None
        return self.vocab_size


PlannedModel: TypeAlias = GPTConfig | OwnModel


def planned_model(model: GPTConfig, architecture: Architecture | None) -> PlannedModel:
    """Return `model`, or if `architecture` is given, an `OwnModel` with `architecture` and its settings from `model`."""
    return model if architecture is None else OwnModel(architecture, model.block_size, model.vocab_size, model.eos_id)


@dataclass(frozen=True, eq=False)
class Weight:
    """Record of a parameter of the planned model. Hashed by identity, so that sums over tuples of weights can be cached.

    Attributes:
        part: one of PARTS, or for a user's model, the first two components of the parameter's name.
        group: the parameter's group in the optimizer (`lit_llm.optim.parameter_groups`). None: frozen.
        block: number of the parameter's block. Blocks that predict further tokens follow the layers. None: in no block.
        own_bytes: bytes of an element with precision 32-true, in the dtype that the model's code chooses.
        experts: for a stack of experts' matrices, the number of experts of the layer on all ranks. 0: no stack of experts.
        share: if FSDP2 gives a rank 1 / n of the elements of other weights, the rank gets share / n of this weight's elements
            (`PlannedRun.weights`).
    """

    name: str
    shape: tuple[int, ...]
    part: str
    group: str | None
    block: int | None = None
    own_bytes: int = 4
    experts: int = 0
    share: float = 1.0

    @functools.cached_property
    def total(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @functools.cached_property
    def split(self) -> float:
        """`total` · `share`: divided by the number of ranks that shard other weights, this is a rank's number of elements."""
        return self.total * self.share

    def itemsize(self, parameter_bytes: int) -> int:
        """Return the bytes of an element in a precision whose weights take `parameter_bytes`. Adapters stay in fp32."""
        return self.own_bytes if parameter_bytes == 4 or self.part == "adapters" else parameter_bytes


Weights: TypeAlias = tuple[Weight, ...]


@cached_by_text
def weights_of(model: PlannedModel, lora: LoRAConfig | None = None, ranks: int = 1, expert: int = 1) -> Weights:
    """Return the parameters on one of `ranks` tensor-parallel ranks, in the model's order. A tied matrix occurs once.

    Tensor parallelism splits matrices, the biases of their output columns, embedding and head. It does not split norms,
    positions and the biases of the two output projections.

    Args:
        expert: number of ranks that share the experts of a layer by expert parallelism.
    """
    from lit_llm.distributed.tensor_parallel_sizes import local_config
    from lit_llm.optim import parameter_groups
    from lit_llm.plan.built_model import build_gpt, build_own

    built: GPT | CustomModel
    if isinstance(model, OwnModel):
        built = build_own(model.architecture, model.vocab_size)
    else:
        built = build_gpt(local_config(model, ranks), lora)
    alike = {"projection": "matrix", "head": "embedding"}  # they differ in their rates only
    groups = {id(p): alike.get(name := str(group["name"]), name) for group in parameter_groups(built) for p in group["params"]}
    stacked = {p for m in built.modules() if getattr(m, "is_stacked", False) for p in m.parameters(recurse=False)}

    def weight(name: str, p: Tensor) -> Weight:
        block = re.match(r"(?:network\.)?blocks\.(\d+)", name)
        return Weight(
            name,
            (len(p) // expert, *p.shape[1:]) if p in stacked else tuple(p.shape),
            ".".join(name.split(".")[:2]) if isinstance(model, OwnModel) else _part(name, p.ndim),
            groups.get(id(p)),
            None if block is None else int(block[1]),
            p.element_size(),
            len(p) if p in stacked else 0,
        )

    return tuple(weight(name, p) for name, p in built.named_parameters())


_PARTS = (  # (what a parameter's name matches, its part); the first match counts
    (r"lora\w*$", "adapters"),
    (r"norm", "norms"),
    (r"convolution", "convolutions"),
    (r"\.bias$", "biases"),
    (r"\.mlp\.router\.", "router"),
    (r"\.ahead\.", "input ahead"),
    (r"^embedding\.", "token embedding"),
    (r"^positions\.", "position embedding"),
    (r"^head\.", "output head"),
    (r"\.attention\.", "attention"),
    (r"", "mlp"),
)


def _part(name: str, dimensions: int) -> str:
    part = next(part for pattern, part in _PARTS if re.search(pattern, name))
    return "experts" if dimensions == 3 and part == "mlp" else part  # E matrices


@cached_by_text
def buffer_bytes(model: OwnModel, parameter_bytes: int) -> int:
    """Return the bytes of the buffers of a user's module in a precision whose weights take `parameter_bytes` an element."""
    from lit_llm.plan.built_model import build_own

    buffers = list(build_own(model.architecture, model.vocab_size).buffers())
    narrow = parameter_bytes < 4  # floating-point buffers get the type of the weights
    return sum(b.numel() * (parameter_bytes if narrow and b.is_floating_point() else b.element_size()) for b in buffers)


def parameters(model: PlannedModel, lora: LoRAConfig | None = None) -> dict[str, int]:
    """Return {part of the model: number of parameters}. A tied head is counted with the embedding."""
    counts = Counter[str]()
    for weight in weights_of(model, lora):
        counts[weight.part] += weight.total
    return {part: counts[part] for part in dict.fromkeys((*PARTS, *counts)) if counts[part]}


def total_parameters(model: PlannedModel, lora: LoRAConfig | None = None) -> int:
    """Return the number of all parameters. A tied matrix counts once."""
    return sum(weight.total for weight in weights_of(model, lora))


# -- bytes of many weights --------------------------------------------------------------------------------------------

kept_sum = functools.lru_cache(maxsize=4 * _MOST_RESULTS)


@kept_sum
def stored_bytes(weights: Weights, parameter_bytes: int, *, trainable: bool = False) -> int:
    """Return the bytes of `weights`, or with `trainable` of the weights that get gradients and optimizer state. Divided by the
    number of ranks that shard the weights, the result is the bytes on a rank."""
    return int(sum(w.split * w.itemsize(parameter_bytes) for w in weights if w.group is not None or not trainable))


def average_bytes(weights: Weights) -> int:
    """Return the bytes of the moving average of the trained weights, which is fp32 in every precision. Divided by the number of
    ranks that shard the weights, the result is the bytes on a rank."""
    return int(sum(4 * w.split for w in weights if w.group is not None))


@kept_sum
def reduced_bytes(weights: Weights) -> int:
    """Return the bytes of the whole (unsharded) gradients of `weights` in fp32, the dtype in which FSDP2 reduces gradients."""
    return sum(4 * w.total for w in weights if w.group is not None)


def is_tied(weights: Weights) -> bool:
    """Whether the output head is tied to the token embedding."""
    return not any(weight.part == "output head" for weight in weights)


@kept_sum
def gathered_bytes(weights: Weights, parameter_bytes: int, compute_bytes: int) -> tuple[int, int]:
    """Return (bytes of the blocks' weights, bytes of all other weights) in the dtypes in which FSDP2 gathers weights: elements
    of linear layers take `compute_bytes` or their stored bytes, whichever is less."""

    def size(weight: Weight) -> int:
        own = weight.itemsize(parameter_bytes)
        linear = weight.part in ("attention", "mlp", "experts", "biases", "adapters", "output head")
        return weight.total * (min(own, compute_bytes) if linear else own)

    blocks, others = (sum(size(w) for w in weights if (w.block is not None) == within) for within in (True, False))
    return blocks, others


@kept_sum
def gathered_groups(weights: Weights, *, tied: bool) -> tuple[Weights, Weights, Weights, int]:
    """Return the groups that FSDP2 gathers: (largest block, root (last norm and head), embedding, number of blocks, 1 or more).

    `tied`: whether the embedding belongs to the root.
    """
    blocks: dict[int, list[Weight]] = {}
    for weight in weights:
        if weight.block is not None:
            blocks.setdefault(weight.block, []).append(weight)
    largest = max(map(tuple, blocks.values()), key=lambda each: stored_bytes(each, 4), default=())
    embedding = () if tied else tuple(weight for weight in weights if weight.part == "token embedding")
    root = tuple(weight for weight in weights if weight.block is None and weight not in embedding)
    return largest, root, embedding, max(1, len(blocks))


def weights_of_stages(weights: Weights, stages: Sequence[StageShare]) -> Weights:
    """Return the weights in a rank's pipeline stages. An embedding that is tied, or is used to predict further tokens, is in
    the first and in the last stage of the pipeline."""
    blocks = {block for stage in stages for block in stage.layers}
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    twice = is_tied(weights) or any(stage.ahead for stage in stages)
    is_here = {"token embedding": first or (last and twice), "position embedding": first}
    return tuple(w for w in weights if (is_here.get(w.part, last) if w.block is None else w.block in blocks))
