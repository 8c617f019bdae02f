"""LoRA (Hu et al. 2021, arXiv 2106.09685): frozen linear layers, each with a trained update of low rank beside it.

Shape letters: B sequences, T positions, i inputs and o outputs of a linear layer, r ``rank``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core.dtensor import draw_
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import above, below, whole
from lit_llm.models.dropout import SITES, Drops, DropsInputs, drop
from lit_llm.models.gpt import GPT, GPTConfig

ADAPTERS = ("lora_a", "lora_b")
"""Names of the parameters of an adapter, beside the `weight` of its layer."""

OF_TRANSFORMERS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention.project",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "mlp.project",
}
"""Linear layers by their usual names in transformers and peft. Only messages use it: here they have one name."""


@dataclass(frozen=True)
class LoRAConfig:
    """Train small adapters (LoRA) beside the frozen weights of --init_from."""

    rank: Annotated[int, whole(1, 65_536)] = 16
    """Rank of each update. An adapter has rank * (inputs + outputs of its layer) parameters."""
    alpha: Annotated[float, above(0, 10**6)] = 32.0
    """Updates are scaled by alpha / rank."""
    targets: list[str] | None = None
    """Linear layers of every block, such as query, or attention.project for that of attention only. null: all. Routed experts
    and routers are none."""
    dropout: Annotated[float, below(0, 1)] = 0.0
    """Probability of dropping an input of an adapter in training. The frozen layer sees all inputs."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoRALinear(DropsInputs):
    """y = x Wᵀ + b + scale · dropout(x) Aᵀ Bᵀ, with A ``lora_a`` (r, i) and B ``lora_b`` (o, r).

    Adapters are stored in fp32 at least, and computed in the dtype of the input: a base in bf16 loses no update to rounding.

    Args:
        linear: the layer whose parameters this one takes over, so that their names, dtype and device stay.
        name: of the layer in its block: one of `dropout.SITES`, or below mlp.shared, which is a block's only MLP then.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig, name: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        empty = partial(torch.empty, device=linear.weight.device, dtype=torch.float32)
        self.lora_a = nn.Parameter(empty(config.rank, linear.in_features))
        self.lora_b = nn.Parameter(empty(linear.out_features, config.rank))
        self.scale, self.dropout, self.site = config.scale, config.dropout, SITES.index(name.replace(".shared.", "."))
        self.first_input = 0  # the number of this rank's first input

    def forward(self, x: Tensor, drops: Drops | None = None) -> Tensor:
        """(B, T, i) → (B, T, o)."""
        return super().forward(x) + self.update(x, self.lora_a, self.lora_b, drops)

    def update(self, x: Tensor, a: Tensor, b: Tensor, drops: Drops | None) -> Tensor:
        """What the adapter adds to the output: (B, T, i) → (B, T, o)."""
        x = drop(x, self.dropout, drops, self.site, stream=False, first=self.first_input)
        low = F.linear(x, a.to(x.dtype)) * self.scale  # (B, T, r)
        return F.linear(low, b.to(x.dtype))

    def reset_adapter(self) -> None:
        """A as torch initialises a linear layer (as in the paper's code and peft), B zero: the first output is the base's."""
        draw_(self.lora_a, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        nn.init.zeros_(self.lora_b)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoRALinear:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_base = tensor is self.weight or tensor is self.bias  # the others are the adapter and its gradients
            return moved if is_base or moved.dtype.itemsize >= tensor.dtype.itemsize else tensor.to(moved.device)

        super()._apply(keep_precision, recurse)
        return self


def apply_lora(model: GPT, config: LoRAConfig) -> None:
    """Freeze a GPT and give the targeted linear layers of its blocks an adapter, in place, also on the meta device.

    The names of all parameters stay. Call it before `parallelize`, and `reset_adapters` after `init_weights`.

    Raises:
        UserError: a target names no layer; the message has the nearest name.
    """
    layers = _linear_layers(model)
    if problems := _target_problems(config, list(layers)):
        raise UserError("\n".join(problems))
    model.requires_grad_(False)
    model.drops = model.drops or config.dropout > 0
    for name, layer in layers.items():
        if _is_target(name, config):
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, LoRALinear(layer, config, name.split(".", 2)[2]))


def _linear_layers(model: GPT) -> dict[str, nn.Linear]:
    """The linear layers of the blocks by name, such as blocks.0.attention.query."""
    found = model.named_modules()
    return {name: module for name, module in found if isinstance(module, nn.Linear) and name.startswith("blocks.")}


def target_problems(config: LoRAConfig, model: GPTConfig) -> list[str]:
    """A sentence for each target that names no linear layer in the blocks of a valid model."""
    return _target_problems(config, list(_linear_layers(_on_meta(model))))


def rank_problem(config: LoRAConfig, model: GPTConfig) -> str | None:
    """A sentence if the rank is above that of the smallest targeted matrix of a valid model: an update cannot have it."""
    layers = {name: layer for name, layer in _linear_layers(_on_meta(model)).items() if _is_target(name, config)}
    if not layers:
        return None
    name, layer = min(layers.items(), key=lambda item: min(item[1].weight.shape))
    outputs, inputs = layer.weight.shape
    if config.rank <= min(outputs, inputs):
        return None
    return (
        f"lora.rank is {config.rank}, but {name.split('.', 2)[2]} is a matrix of {outputs} x {inputs}, whose rank is at most "
        f"{min(outputs, inputs)} (--lora.rank {min(outputs, inputs)}, or leave that layer out of --lora.targets)"
    )


def _on_meta(model: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(replace(model, vocab_size=model.vocab_size or (model.eos_id or 0) + 1))


def _is_target(layer: str, config: LoRAConfig) -> bool:
    return config.targets is None or any(_names(target, layer) for target in config.targets)


def _target_problems(config: LoRAConfig, layers: list[str]) -> list[str]:
    if config.targets is None:
        return []
    if not config.targets:
        return ["lora.targets is empty, but must name linear layers, or be null for all of them (--lora.targets)"]
    known = list(dict.fromkeys(ending for name in layers for ending in _endings(name)))
    found = []
    for target in config.targets:
        if not any(_names(target, name) for name in layers):
            near = OF_TRANSFORMERS.get(target)
            if near not in known:
                near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)[0]
            found.append(
                f"lora.targets has {target!r}, but the model has no such linear layer; the nearest is {near} "
                f"(--lora.targets; layers: {', '.join(name for name in known if '.' not in name)})"
            )
    return found


def _names(target: str, layer: str) -> bool:
    """Whether a target names a layer such as blocks.0.mlp.project: project (also attention's) and mlp.project do."""
    return target in _endings(layer)


def _endings(layer: str) -> list[str]:
    """The names of a layer of any block: `up`, `shared.up`, `mlp.shared.up`."""
    names = layer.split(".")[2:]
    return [".".join(names[start:]) for start in reversed(range(len(names)))]


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return parameter.rpartition(".")[2] in ADAPTERS


def reset_adapters(model: nn.Module) -> None:
    """Initialise all adapters. The draws are the same on any number of ranks."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.reset_adapter()


class MergedTensor:
    """A frozen weight plus the update of its adapter, in fp32. Indexing computes only that box, and reads no more from disk.

    Args:
        weight: (o, i), a tensor or on disk.
        a: (r, i).
        b: (o, r).
    """

    def __init__(self, weight: Any, a: Tensor, b: Tensor, scale: float) -> None:
        self.weight, self.a, self.b, self.scale = weight, a, b, scale
        self.shape: torch.Size = weight.shape
        self.dtype: torch.dtype = weight.dtype
        """Of the frozen weight."""

    def __getitem__(self, box: Any) -> Tensor:
        rows, columns = (slice(None), slice(None)) if box is ... else box
        merged: Tensor = self.weight[box].float() + self.scale * (self.b[rows].float() @ self.a[:, columns].float())
        return merged


def merged_weights(weights: Mapping[str, Any], adapters: Mapping[str, Any], config: LoRAConfig) -> dict[str, MergedTensor]:
    """The weights that have an adapter, merged with it, by their names.

    Args:
        weights: of the frozen model, tensors or on disk.
        adapters: `….lora_a` (r, i) and `….lora_b` (o, r) by name.

    Raises:
        UserError: adapters do not fit the weights.
    """
    layers = [name.removesuffix("lora_a") for name in adapters if name.endswith(".lora_a")]
    for layer in layers:
        names = [f"{layer}{each}" for each in ("weight", "lora_a", "lora_b")]
        shapes = [
            tuple(tree[name].shape) if name in tree else ()
            for tree, name in zip((weights, adapters, adapters), names, strict=True)
        ]
        if shapes[1:] != [(config.rank, *shapes[0][1:]), (*shapes[0][:1], config.rank)]:
            raise UserError(f"adapters of rank {config.rank} do not fit their base: {names} have the shapes {shapes}")
    return {
        f"{layer}weight": MergedTensor(
            weights[f"{layer}weight"], adapters[f"{layer}lora_a"][...], adapters[f"{layer}lora_b"][...], config.scale
        )
        for layer in layers
    }


def trainable(model: nn.Module) -> tuple[int, int]:
    """The numbers of trainable and of all parameters."""
    counts = [(p.numel() * p.requires_grad, p.numel()) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for _, count in counts)


def flops_saved(model: GPT) -> float:
    """How many FLOPs per token fewer than `GPTConfig.flops_per_token` a step needs, because matrices are frozen.

    A frozen matrix needs no gradient of its own: 4 FLOPs per parameter and token instead of 6 (forward, and the gradient of
    its input). An adapter needs 6. The head counts as frozen, the look-up in the embedding not at all. Zero without LoRA.
    """
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    return model.config.flops_per_token(0) / 3 - 6.0 * adapters if adapters else 0.0
