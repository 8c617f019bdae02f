"""Maps the tensors of a Hugging Face folder ("theirs") to the tensors of our model ("ours"), for import and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from lit_llm.models.gpt import GPTConfig
from lit_llm.models.latent_config import LatentConfig

VOCABULARY = ("embedding.weight", "head.weight")
"""Names of our tensors with one row per token id. They may have rows of padding, which Hugging Face folders lack."""
CHOICE_BIAS = "router.choice_bias"
"""Ending of our name of the bias that a router adds to its scores to choose experts."""


@dataclass(frozen=True)
class Link:
    """Record: a tensor of a Hugging Face folder (`theirs`) contains our tensors `ours`, stacked along dimension 0.

    One of our tensors can be in two links: import requires both of their tensors to be equal, export writes both. A bias that
    our model lacks is exported as zeros.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Whether their matrix has the shape (in, out), for x @ W, as in GPT-2; ours is (out, in)."""
    order: tuple[int, ...] | None = None
    """For each row of ours, the index of the same row in their tensor; None if rows have the same order. See `rows_by_head`."""
    expert: int | None = None
    """Index of the expert whose matrix their tensor is, while our tensor has those of all experts. None: no single expert's."""
    of_experts: bool = False
    """Whether their tensor, like ours, has the matrices of all experts. Its outputs alternate between our tensors: output i is
    from tensor i modulo their number. `transposed` then means each expert's matrix."""

    def shape(self, parts: Sequence[torch.Size]) -> tuple[int, ...]:
        """Return the shape of the tensor `theirs`. `parts`: shapes of `ours`; if `expert` is set, of one expert's matrices."""
        if self.of_experts:
            experts, *matrix = parts[0]
            matrix[0] *= len(parts)
            return experts, *(reversed(matrix) if self.transposed else matrix)
        whole = (sum(part[0] for part in parts), *parts[0][1:])
        return tuple(reversed(whole)) if self.transposed else whole

    def split(self, theirs: Tensor, parts: Sequence[torch.Size]) -> list[Tensor]:
        """Return our tensors, with the shapes `parts`, taken out of the tensor `theirs`; they are views of it if possible."""
        if self.of_experts:
            by_output = theirs.mT if self.transposed else theirs
            return list(by_output.unflatten(1, (-1, len(parts))).unbind(2))
        whole = theirs.T if self.transposed else theirs
        if self.order is not None:
            whole = whole[list(self.order)]
        return list(whole.split([part[0] for part in parts]))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the tensor of the Hugging Face folder, a copy, made of our tensors `ours`."""
        if self.of_experts:
            by_output = torch.stack(list(ours), dim=2).flatten(1, 2)
            return by_output.mT if self.transposed else by_output
        whole = torch.cat(list(ours))
        if self.order is not None:
            whole = torch.empty_like(whole).index_copy_(0, torch.tensor(self.order, device=whole.device), whole)
        return whole.T if self.transposed else whole


def rows_by_head(heads: int, *parts: Sequence[int]) -> tuple[int, ...]:
    """Return `Link.order` for a tensor in the folder that has, head by head, rows of all our tensors of a link.

    Args:
        heads: number of heads.
        parts: for each of our tensors, the indices of its rows within the rows of one head in the folder.
    """
    height = sum(map(len, parts))
    return tuple(head * height + row for part in parts for head in range(heads) for row in part)


def linear(
    theirs: str, *ours: str, bias: bool, transposed: bool = False, order: tuple[int, ...] | None = None
) -> Iterator[Link]:
    """Yield a `Link` (their tensor, our tensors in it) for the weight of a linear layer or a norm and, if `bias`, one for its
    bias. `theirs`, `ours`: names of the layers."""
    yield Link(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed, order)
    if bias:
        yield Link(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours), order=order)


_NORMS = {
    "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attention_output_norm", "post_feedforward_layernorm": "mlp_output_norm"},
    "sandwich": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
}
"""Our setting `norm_position` → {their name of a norm in a block: our name}."""
_ATTENTION = {"q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",), "o_proj": ("project",)}
_MLP = {"gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("project",)}
Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Type of a dict: their name of a matrix → our names of the matrices that it contains."""


@dataclass(frozen=True)
class ExpertNames:
    """Record of the names that a family of transformers has in a block with experts. `block`: module in place of the MLP."""

    block: str = "mlp"
    matrices: Mapping[str, str] = field(default_factory=lambda: {"gate_proj": "gate", "up_proj": "up", "down_proj": "project"})
    """Their name of each matrix of an expert → our name of it."""
    choice_bias: str | None = None
    """Their name of the bias that the router adds to choose experts. None: the family has no such bias."""
    in_one: bool = False
    """Whether one tensor of theirs has the matrices or biases of all experts, under the names of GPT-OSS."""

    def links(self, config: GPTConfig, a: str, b: str) -> Iterator[Link]:
        """Yield the `Link`s of the router and the experts of a block. `a`: prefix of their names; `b`: prefix of our names."""
        moe, a = config.moe, f"{a}.{self.block}"
        assert moe is not None
        if self.in_one:
            yield from linear(f"{a}.router", f"{b}.mlp.router", bias=True)
            fused: Names = {"gate_up_proj": ("gate", "up"), "down_proj": ("project",)}
            for name, parts in fused.items():
                for end, kind in (("", "weight"), ("_bias", "bias")):
                    names = tuple(f"{b}.mlp.{part}.{kind}" for part in parts)
                    yield Link(f"{a}.experts.{name}{end}", names, transposed=not end, of_experts=True)
            return
        yield Link(f"{a}.gate.weight", (f"{b}.mlp.router.weight",))
        if self.choice_bias is not None:
            yield Link(f"{a}.gate.{self.choice_bias}", (f"{b}.mlp.{CHOICE_BIAS}",))
        for expert in range(moe.experts):
            for theirs, ours in self.matrices.items():
                yield Link(f"{a}.experts.{expert}.{theirs}.weight", (f"{b}.mlp.{ours}.weight",), expert=expert)
        for theirs, ours in self.matrices.items() if moe.shared_experts else ():
            yield Link(f"{a}.shared_experts.{theirs}.weight", (f"{b}.mlp.shared.{ours}.weight",))


def _latent_attention(config: GPTConfig, latent: LatentConfig, a: str, b: str) -> Iterator[Link]:
    """Yield the links of DeepSeek's latent attention. `a`: prefix of their names; `b`: prefix of our names.

    In each head in the folder, rotated rows come last, in adjacent pairs; in our heads, they come first, in two halves.
    """
    plain, rotated, heads = latent.nope_head_dim, latent.rope_head_dim, config.n_head
    halves = [*range(0, rotated, 2), *range(1, rotated, 2)]
    queries = rows_by_head(heads, [*(plain + i for i in halves), *range(plain)])
    bias = config.has_bias("qkv")
    if latent.query_rank is None:
        yield from linear(f"{a}.q_proj", f"{b}.query", bias=False, order=queries)
    else:
        yield from linear(f"{a}.q_a_proj", f"{b}.query_latent", bias=bias)
        yield from linear(f"{a}.q_a_layernorm", f"{b}.query_latent_norm", bias=False)
        yield from linear(f"{a}.q_b_proj", f"{b}.query", bias=False, order=queries)
    order = rows_by_head(1, range(latent.kv_rank), [latent.kv_rank + i for i in halves])
    yield from linear(f"{a}.kv_a_proj_with_mqa", f"{b}.latent", f"{b}.rotary_key", bias=bias, order=order)
    yield from linear(f"{a}.kv_a_layernorm", f"{b}.latent_norm", bias=False)
    order = rows_by_head(heads, range(plain), range(plain, plain + latent.value_head_dim))
    yield from linear(f"{a}.kv_b_proj", f"{b}.key", f"{b}.value", bias=False, order=order)
    yield from linear(f"{a}.o_proj", f"{b}.project", bias=config.has_bias("attention_output"))


def decoder(
    config: GPTConfig, *, attention: Names = _ATTENTION, mlp: Names = _MLP, experts: ExpertNames | None = None
) -> Iterator[Link]:
    """Yield the `Link`s (their tensor, our tensors in it) of a decoder without its output head. Their names are those that most
    families since LLaMA use.

    Args:
        attention: their names of the matrices of attention, without prefix → our names.
        mlp: their names of the matrices of an MLP, without prefix → our names.
        experts: their names in blocks with experts. None: `ExpertNames()`.
    """
    norm_bias = config.norm == "layernorm" and config.has_bias("norm")
    yield Link("model.embed_tokens.weight", ("embedding.weight",))
    for i in range(config.n_layer):
        a, b = f"model.layers.{i}", f"blocks.{i}"
        for theirs, norm in _NORMS[config.norm_position].items():
            yield from linear(f"{a}.{theirs}", f"{b}.{norm}", bias=norm_bias)
        if config.latent is not None:
            yield from _latent_attention(config, config.latent, f"{a}.self_attn", f"{b}.attention")
        for theirs, ours in attention.items() if config.latent is None else ():
            bias = config.has_bias("attention_output" if ours == ("project",) else "qkv")
            yield from linear(f"{a}.self_attn.{theirs}", *(f"{b}.attention.{name}" for name in ours), bias=bias)
        if config.qk_norm:
            yield Link(f"{a}.self_attn.q_norm.weight", (f"{b}.attention.query_norm.weight",))
            yield Link(f"{a}.self_attn.k_norm.weight", (f"{b}.attention.key_norm.weight",))
        if config.attention_sinks:
            yield Link(f"{a}.self_attn.sinks", (f"{b}.attention.sinks",))
        if config.layer(i).experts:
            yield from (experts or ExpertNames()).links(config, a, b)
            continue
        for theirs, ours in mlp.items():
            # relu2 computes relu(Wx)²: their gate and up are both our up.
            names = ["up" if name == "gate" and config.mlp == "relu2" else name for name in ours]
            yield from linear(f"{a}.mlp.{theirs}", *(f"{b}.mlp.{name}" for name in names), bias=config.has_bias("mlp"))
    yield from linear("model.norm", "norm", bias=norm_bias)
