"""LoRA (Hu et al. 2021, arXiv 2106.09685): linear layers with frozen weights and a trained low-rank update, the adapter.

Shape letters: B sequences, T positions, i inputs and o outputs of a linear layer, r ``rank``, E experts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core.dtensor import differentiable_part, draw_
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import above, below, whole
from lit_llm.models.dropout import SITES, Drops, DropsInputs, drop
from lit_llm.models.experts import StackedLinear, grouped_linear
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.router import Router
from lit_llm.models.small_layers import KeepsPrecision

ADAPTERS = ("lora_a", "lora_b")
"""Names of an adapter's two parameters, in the same module as the layer's frozen `weight`."""

OF_TRANSFORMERS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention.project",
    **{"q_a_proj": "query_latent", "q_b_proj": "query", "kv_a_proj_with_mqa": "latent", "kv_b_proj": "value"},
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "mlp.project",
}
"""Name of a linear layer in transformers and peft → its name in lit_llm. Only error messages use this table."""


@dataclass(frozen=True)
class LoRAConfig:
    """Train small adapters (LoRA) beside the frozen weights of --init_from."""

    rank: Annotated[int, whole(1, 65_536)] = 16
    """Rank of each update. An adapter has rank * (inputs + outputs of its layer) parameters."""
    alpha: Annotated[float, above(0, 10**6)] = 32.0
    """Scale of the updates: an adapter's update is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Names of linear layers of the blocks that get adapters, such as query; attention.project is only attention's project.
    null: all but routers and routed experts, which must be named: router, experts.up, experts.gate, experts.project."""
    dropout: Annotated[float, below(0, 1)] = 0.0
    """Dropout probability of an adapter's inputs in training. The frozen layer gets all inputs."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapted(KeepsPrecision):
    """Base class of layers with an adapter: A ``lora_a`` (r, i) and B ``lora_b`` (o, r); of E experts (E, r, i) and (E, o, r).

    An Adapted takes over the parameters, buffers and settings of the layer that it replaces, with names, dtypes and devices.
    Adapters are stored in fp32 at least, so that rounding loses no update, and computed in the dtype of the input.
    """

    weight: Any  # of `nn.Linear`, a router or a stack, whose types differ
    bias: Any

    def __init__(self, layer: nn.Module, config: LoRAConfig) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        *experts, outputs, inputs = self.weight.shape
        empty = partial(torch.empty, device=self.weight.device, dtype=torch.float32)
        self.lora_a = nn.Parameter(empty(*experts, config.rank, inputs))
        self.lora_b = nn.Parameter(empty(*experts, outputs, config.rank))
        self.scale = config.scale

    def reset_adapter(self) -> None:
        """Initialise A like an nn.Linear's weight (as the paper's code and peft do), and B with zeros: no update at first."""
        bound = 1 / math.sqrt(self.lora_a.size(-1))
        draw_(self.lora_a, partial(nn.init.uniform_, a=-bound, b=bound))
        nn.init.zeros_(self.lora_b)


class LoRALinear(Adapted, DropsInputs):
    """A linear layer with an adapter: y = x Wᵀ + b + scale · dropout(x) Aᵀ Bᵀ.

    Args:
        name: the layer's name in its block, by which its dropout has a site in `dropout.SITES`. A layer of shared experts,
            mlp.shared.X, has the site mlp.X, because its block has no other MLP.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig, name: str) -> None:
        super().__init__(linear, config)
        self.dropout, self.site = config.dropout, SITES.index(name.replace(".shared.", "."))
        self.first_input = 0  # the number of this rank's first input

    def forward(self, x: Tensor, drops: Drops | None = None) -> Tensor:
        """Apply the layer and its adapter: (B, T, i) → (B, T, o)."""
        return super().forward(x) + self.update(x, self.lora_a, self.lora_b, drops)

    def merged(self) -> Tensor:
        weight: Tensor = self.weight
        return weight + (self.scale * (self.lora_b @ self.lora_a)).to(weight.dtype)

    def update(self, x: Tensor, a: Tensor, b: Tensor, drops: Drops | None) -> Tensor:
        """Return the adapter's term of the output, scale · dropout(x) Aᵀ Bᵀ: (B, T, i) → (B, T, o)."""
        x = drop(x, self.dropout, drops, self.site, stream=False, first=self.first_input)
        low = F.linear(x, a.to(x.dtype)) * self.scale  # (B, T, r)
        return F.linear(low, b.to(x.dtype))


class LoRARouter(Adapted, Router):
    """A router with an adapter, which adds scale · x Aᵀ Bᵀ to the router's logits."""

    def logits(self, x: Tensor) -> Tensor:
        a, b = (differentiable_part(each).to(x.dtype) for each in (self.lora_a, self.lora_b))
        return super().logits(x) + F.linear(F.linear(x, a) * self.scale, b)


class LoRAStackedLinear(Adapted, StackedLinear):
    """A `StackedLinear` (a linear layer for each expert) with an adapter for each expert."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y = super().forward(x, ends)
        a, b = (differentiable_part(each).to(y.dtype) for each in (self.lora_a, self.lora_b))
        return y + grouped_linear(grouped_linear(x.to(y.dtype), a, ends) * self.scale, b, ends)  # (M, i) → (M, r) → (M, o)


def apply_lora(model: GPT, config: LoRAConfig) -> None:
    """Freeze a GPT and give the targeted linear layers of its blocks an adapter, in place, also on the meta device.

    The names of all parameters stay the same. Call this before `parallelize`. `GPT.init_weights` also draws the adapters.

    Raises:
        UserError: a target names no layer; the message has the nearest name.
    """
    layers = _linear_layers(model)
    refuse(_target_problems(config, layers))
    model.requires_grad_(False)
    model.drops = model.drops or config.dropout > 0
    for name, layer in layers.items():
        if _is_target(layer_name(name, layer), layer, config):
            parent, _, own_name = name.rpartition(".")
            adapted: Adapted
            if isinstance(layer, Router):
                adapted = LoRARouter(layer, config)
            elif isinstance(layer, StackedLinear):
                adapted = LoRAStackedLinear(layer, config)
            else:
                adapted = LoRALinear(layer, config, name.split(".", 2)[2])
            setattr(model.get_submodule(parent), own_name, adapted)


Layer: TypeAlias = nn.Linear | StackedLinear | Router


def _linear_layers(model: GPT) -> dict[str, Layer]:
    """Return {name, such as blocks.0.attention.query: layer} for the layers of the blocks that can have an adapter."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, Layer) and name.startswith("blocks.")}


def layer_name(name: str, layer: Layer) -> str:
    """Return a layer's name as `LoRAConfig.targets` has it: attention.query for blocks.0.attention.query. The name of a layer
    of routed experts gets "experts": mlp.experts.up for blocks.0.mlp.up."""
    *_, inside = name.split(".", 2)
    return inside.replace("mlp.", "mlp.experts.") if isinstance(layer, StackedLinear) else inside


def target_problems(config: LoRAConfig, model: GPTConfig) -> list[str]:
    """Return a sentence for each target that the model does not have, and a sentence if `config` has dropout and targets
    routers or routed experts, whose adapters do not support dropout. The model must be valid."""
    return _target_problems(config, _linear_layers(_on_meta(model)))


def rank_problem(config: LoRAConfig, model: GPTConfig) -> str | None:
    """Return a sentence if the adapters' rank exceeds the shorter side of a targeted matrix. The model must be valid."""
    named = {layer_name(name, layer): layer for name, layer in _linear_layers(_on_meta(model)).items()}
    layers = {name: layer for name, layer in named.items() if _is_target(name, layer, config)}
    if not layers:
        return None
    name, layer = min(layers.items(), key=lambda item: min(item[1].weight.shape[-2:]))
    outputs, inputs = layer.weight.shape[-2:]
    if config.rank <= min(outputs, inputs):
        return None
    return (
        f"lora.rank is {config.rank}, but {name} is a matrix of {outputs} x {inputs}, whose rank is at most "
        f"{min(outputs, inputs)} (--lora.rank {min(outputs, inputs)}, or leave that layer out of --lora.targets)"
    )


def _on_meta(model: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(replace(model, vocab_size=model.vocab_size or (model.eos_id or 0) + 1))


def _is_target(name: str, layer: Layer, config: LoRAConfig) -> bool:
    if config.targets is None:
        return isinstance(layer, nn.Linear)
    return any(target in _endings(name) for target in config.targets)


def _target_problems(config: LoRAConfig, modules: Mapping[str, Layer]) -> list[str]:
    layers = {layer_name(name, layer): layer for name, layer in modules.items()}
    if config.targets is None:
        return []
    if not config.targets:
        return ["lora.targets is empty, but must name linear layers, or be null for all of them (--lora.targets)"]
    known = list(dict.fromkeys(ending for name in layers for ending in _endings(name)))
    problems = []
    for target in config.targets:
        if target not in known:
            near = OF_TRANSFORMERS.get(target)
            if near not in known:
                near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)[0]
            problems.append(
                f"lora.targets has {target!r}, but the model has no such linear layer; the nearest is {near} "
                f"(--lora.targets; layers: {', '.join(name for name in known if '.' not in name)})"
            )
    routed = [name for name, layer in layers.items() if not isinstance(layer, nn.Linear) and _is_target(name, layer, config)]
    if routed and config.dropout:
        problems.append(
            f"lora.dropout is {config.dropout}, but adapters of routers and routed experts ({routed[0]}) have none "
            "(--lora.dropout 0, or other --lora.targets)"
        )
    return problems


def _endings(layer: str) -> list[str]:
    """Return all targets that select a layer: `up`, `shared.up` and `mlp.shared.up` for mlp.shared.up. `up` alone does not
    select routed experts: `experts.up` and `mlp.experts.up` select mlp.experts.up."""
    names = layer.split(".")
    endings = [".".join(names[start:]) for start in reversed(range(len(names)))]
    return endings[1:] if "experts" in names else endings


def is_adapter(parameter: str) -> bool:
    """Whether a parameter with the name `parameter` is part of an adapter."""
    return parameter.rpartition(".")[2] in ADAPTERS


class MergedTensor:
    """A frozen weight plus the update of its adapter, in fp32. Indexing by slices reads and computes only these slices.

    Args:
        weight: (o, i), or (E, o, i) of experts: a tensor, or a tensor on disk with shape, dtype and indexing.
        a, b: the adapter: (r, i) and (o, r), or (E, r, i) and (E, o, r) of experts.
        scale: factor of the update.
    """

    def __init__(self, weight: Any, a: Tensor, b: Tensor, scale: float) -> None:
        self.weight, self.a, self.b, self.scale = weight, a, b, scale
        self.shape: torch.Size = weight.shape
        self.dtype: torch.dtype = weight.dtype
        """Dtype of the frozen weight. Indexing returns fp32."""

    def __getitem__(self, box: Any) -> Tensor:
        whole = (slice(None),)
        rows, columns = (whole * (self.a.ndim - 1), whole) if box is ... else (box[:-1], box[-1:])
        a = self.a[rows[:-1] + whole + columns].float()
        merged: Tensor = self.weight[box].float() + self.scale * (self.b[rows].float() @ a)
        return merged


def merged_weights(weights: Mapping[str, Any], adapters: Mapping[str, Any], config: LoRAConfig) -> dict[str, MergedTensor]:
    """Merge adapters into weights: {name: weight + update} for each weight with an adapter. Other weights are left out.

    Args:
        weights: name → weight of the frozen model, a tensor or a tensor on disk.
        adapters: name → adapter parameter, `….lora_a` (…, r, i) and `….lora_b` (…, o, r).

    Raises:
        UserError: the adapters' shapes do not fit the weights.
    """
    layers = [name.removesuffix("lora_a") for name in adapters if name.endswith(".lora_a")]
    for layer in layers:
        names = [f"{layer}{each}" for each in ("weight", "lora_a", "lora_b")]
        shapes = [
            tuple(tree[name].shape) if name in tree else ()
            for tree, name in zip((weights, adapters, adapters), names, strict=True)
        ]
        if shapes[1:] != [(*shapes[0][:-2], config.rank, *shapes[0][-1:]), (*shapes[0][:-1], config.rank)]:
            raise UserError(f"adapters of rank {config.rank} do not fit their base: {names} have the shapes {shapes}")
    return {
        f"{layer}weight": MergedTensor(
            weights[f"{layer}weight"], adapters[f"{layer}lora_a"][...], adapters[f"{layer}lora_b"][...], config.scale
        )
        for layer in layers
    }


def trainable(model: nn.Module) -> tuple[int, int]:
    """Return (number of trainable parameters, number of all parameters) of a model."""
    counts = [(p.numel() * p.requires_grad, p.numel()) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for _, count in counts)


def flops_saved(model: GPT) -> float:
    """Return by how many FLOPs per token a step with LoRA is below `GPTConfig.flops_per_token`; 0 without LoRA.

    A frozen matrix needs no gradient of its own: 4 FLOPs per parameter and token (forward, and the gradient of its input)
    instead of 6. An adapter needs 6 FLOPs per parameter; of the routed experts' adapters, only the adapters of top_k experts
    count. The head counts as frozen, the look-up in the embedding not at all.
    """
    moe = model.config.moe
    adapters = sum(
        parameter.numel() * (moe.top_k / moe.experts if moe is not None and parameter.ndim == 3 else 1)
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    )
    return model.config.flops_per_token(0) / 3 - 6.0 * adapters if adapters else 0.0
