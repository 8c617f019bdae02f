"""LoRA (Hu et al. 2021, arXiv 2106.09685): frozen linear layers, each with a trained update of low rank beside it.

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
"""Names of the parameters of an adapter, beside the `weight` of its layer."""

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
"""Names of linear layers in transformers and peft → their names here. Only error messages use it."""


@dataclass(frozen=True)
class LoRAConfig:
    """Train small adapters (LoRA) beside the frozen weights of --init_from."""

    rank: Annotated[int, whole(1, 65_536)] = 16
    """Rank of each update. An adapter has rank * (inputs + outputs of its layer) parameters."""
    alpha: Annotated[float, above(0, 10**6)] = 32.0
    """Updates are scaled by alpha / rank."""
    targets: list[str] | None = None
    """Names of linear layers of the blocks, such as query; attention.project means attention's project only. null: all but
    routers and routed experts, which have adapters if they are named: router, experts.up, experts.gate, experts.project."""
    dropout: Annotated[float, below(0, 1)] = 0.0
    """Probability of dropping an input of an adapter in training. The frozen layer sees all inputs."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapted(KeepsPrecision):
    """A layer with an adapter: A ``lora_a`` (r, i) and B ``lora_b`` (o, r), or those of E experts: (E, r, i) and (E, o, r).

    It takes over the parameters, buffers and settings of the layer that it replaces, with their names, dtypes and devices.
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
        """Initialise A as torch does a linear layer (as the paper's code and peft do), and B with zeros: no update at first."""
        bound = 1 / math.sqrt(self.lora_a.size(-1))
        draw_(self.lora_a, partial(nn.init.uniform_, a=-bound, b=bound))
        nn.init.zeros_(self.lora_b)


class LoRALinear(Adapted, DropsInputs):
    """y = x Wᵀ + b + scale · dropout(x) Aᵀ Bᵀ.

    Args:
        name: the layer's name in its block, which names the site of its dropout in `dropout.SITES`. A layer of shared experts,
            mlp.shared.X, has the site mlp.X, because its block has no other MLP.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig, name: str) -> None:
        super().__init__(linear, config)
        self.dropout, self.site = config.dropout, SITES.index(name.replace(".shared.", "."))
        self.first_input = 0  # the number of this rank's first input

    def forward(self, x: Tensor, drops: Drops | None = None) -> Tensor:
        """(B, T, i) → (B, T, o)."""
        return super().forward(x) + self.update(x, self.lora_a, self.lora_b, drops)

    def merged(self) -> Tensor:
        weight: Tensor = self.weight
        return weight + (self.scale * (self.lora_b @ self.lora_a)).to(weight.dtype)

    def update(self, x: Tensor, a: Tensor, b: Tensor, drops: Drops | None) -> Tensor:
        """Return the adapter's term of the output: (B, T, i) → (B, T, o)."""
        x = drop(x, self.dropout, drops, self.site, stream=False, first=self.first_input)
        low = F.linear(x, a.to(x.dtype)) * self.scale  # (B, T, r)
        return F.linear(low, b.to(x.dtype))


class LoRARouter(Adapted, Router):
    """A router whose logits have an update: scale · x Aᵀ Bᵀ."""

    def logits(self, x: Tensor) -> Tensor:
        a, b = (differentiable_part(each).to(x.dtype) for each in (self.lora_a, self.lora_b))
        return super().logits(x) + F.linear(F.linear(x, a) * self.scale, b)


class LoRAStackedLinear(Adapted, StackedLinear):
    """A linear layer and an adapter for each expert."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y = super().forward(x, ends)
        a, b = (differentiable_part(each).to(y.dtype) for each in (self.lora_a, self.lora_b))
        return y + grouped_linear(grouped_linear(x.to(y.dtype), a, ends) * self.scale, b, ends)  # (M, i) → (M, r) → (M, o)


def apply_lora(model: GPT, config: LoRAConfig) -> None:
    """Freeze a GPT and give the targeted linear layers of its blocks an adapter, in place, also on the meta device.

    The names of all parameters stay. Call it before `parallelize`. `GPT.init_weights` also draws the adapters.

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
    """Return the layers of the blocks that can have an adapter, by name, such as blocks.0.attention.query."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, Layer) and name.startswith("blocks.")}


def layer_name(name: str, layer: Layer) -> str:
    """Return a layer's name in targets: attention.query for blocks.0.attention.query, mlp.experts.up for routed experts."""
    *_, inside = name.split(".", 2)
    return inside.replace("mlp.", "mlp.experts.") if isinstance(layer, StackedLinear) else inside


def target_problems(config: LoRAConfig, model: GPTConfig) -> list[str]:
    """Return a sentence for each target that the model does not have, and one if there is a dropout and the targets include
    routers or routed experts, whose adapters have none. The model must be valid."""
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
    """Return all targets that select a layer: for mlp.shared.up these are `up`, `shared.up` and `mlp.shared.up`. The last name
    alone does not select routed experts: mlp.experts.up has `experts.up` and `mlp.experts.up`."""
    names = layer.split(".")
    endings = [".".join(names[start:]) for start in reversed(range(len(names)))]
    return endings[1:] if "experts" in names else endings


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
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
    """Return by name those weights that have an adapter, merged with it. The other weights are left out.

    Args:
        weights: weights of the frozen model by name: tensors, or tensors on disk.
        adapters: `….lora_a` (…, r, i) and `….lora_b` (…, o, r) by name.

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
        if shapes[1:] != [(*shapes[0][:-2], config.rank, *shapes[0][-1:]), (*shapes[0][:-1], config.rank)]:
            raise UserError(f"adapters of rank {config.rank} do not fit their base: {names} have the shapes {shapes}")
    return {
        f"{layer}weight": MergedTensor(
            weights[f"{layer}weight"], adapters[f"{layer}lora_a"][...], adapters[f"{layer}lora_b"][...], config.scale
        )
        for layer in layers
    }


def trainable(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters."""
    counts = [(p.numel() * p.requires_grad, p.numel()) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for _, count in counts)


def flops_saved(model: GPT) -> float:
    """Return by how many FLOPs per token a step with LoRA is below `GPTConfig.flops_per_token`; 0 without LoRA.

    A frozen matrix needs no gradient of its own: 4 FLOPs per parameter and token instead of 6 (forward, and the gradient of
    its input). An adapter needs 6 per parameter; of the adapters of routed experts, only those of top_k experts count. The head
    counts as frozen, the look-up in the embedding not at all.
    """
    moe = model.config.moe
    adapters = sum(
        parameter.numel() * (moe.top_k / moe.experts if moe is not None and parameter.ndim == 3 else 1)
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    )
    return model.config.flops_per_token(0) / 3 - 6.0 * adapters if adapters else 0.0
