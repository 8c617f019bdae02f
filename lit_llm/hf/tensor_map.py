"""The mapping between the tensors of a Hugging Face folder and ours: one table for both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VOCABULARY = ("embedding.weight", "head.weight")
"""Our tensors with one row per token id. They are padded here, but not in Hugging Face folders."""


@dataclass(frozen=True)
class Link:
    """One tensor of the folder, and our tensors that it contains, stacked along the first dimension."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """GPT-2 stores its matrices as (in, out), for x @ W."""


def links(content: dict[str, Any]) -> list[Link]:
    """The links of the model in a config.json.

    One of our tensors can be in two links: import requires both to be equal, export writes both. A bias that we do not have is
    exported as zero.
    """
    return list(_gpt2(content) if content["model_type"] == "gpt2" else _llama_like(content))


def _linear(theirs: str, *ours: str, bias: bool, transposed: bool = False) -> Iterator[Link]:
    yield Link(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)
    if bias:
        yield Link(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))


def _gpt2(content: dict[str, Any]) -> Iterator[Link]:
    yield Link("transformer.wte.weight", ("embedding.weight",))
    yield Link("transformer.wpe.weight", ("positions.weight",))
    for i in range(content["n_layer"]):
        a, b = f"transformer.h.{i}", f"blocks.{i}"
        yield from _linear(f"{a}.ln_1", f"{b}.attention_norm", bias=True)
        qkv = [f"{b}.attention.{name}" for name in ("query", "key", "value")]
        yield from _linear(f"{a}.attn.c_attn", *qkv, bias=True, transposed=True)
        yield from _linear(f"{a}.attn.c_proj", f"{b}.attention.project", bias=True, transposed=True)
        yield from _linear(f"{a}.ln_2", f"{b}.mlp_norm", bias=True)
        yield from _linear(f"{a}.mlp.c_fc", f"{b}.mlp.up", bias=True, transposed=True)
        yield from _linear(f"{a}.mlp.c_proj", f"{b}.mlp.project", bias=True, transposed=True)
    yield from _linear("transformer.ln_f", "norm", bias=True)
    if not content.get("tie_word_embeddings", True):
        yield Link("lm_head.weight", ("head.weight",))


def _llama_like(content: dict[str, Any]) -> Iterator[Link]:
    attention_bias = bool(content.get("attention_bias", False))
    mlp_bias = bool(content.get("mlp_bias", False))
    gate = "up" if content.get("hidden_act") == "relu" else "gate"  # relu(Wx)²: gate and up are the same matrix
    yield Link("model.embed_tokens.weight", ("embedding.weight",))
    for i in range(content["num_hidden_layers"]):
        a, b = f"model.layers.{i}", f"blocks.{i}"
        yield Link(f"{a}.input_layernorm.weight", (f"{b}.attention_norm.weight",))
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            bias = attention_bias or content["model_type"] == "qwen2"  # no key says so
            yield from _linear(f"{a}.self_attn.{theirs}_proj", f"{b}.attention.{ours}", bias=bias)
        yield from _linear(f"{a}.self_attn.o_proj", f"{b}.attention.project", bias=attention_bias)
        if content["model_type"] == "qwen3":  # no key says so
            yield Link(f"{a}.self_attn.q_norm.weight", (f"{b}.attention.query_norm.weight",))
            yield Link(f"{a}.self_attn.k_norm.weight", (f"{b}.attention.key_norm.weight",))
        yield Link(f"{a}.post_attention_layernorm.weight", (f"{b}.mlp_norm.weight",))
        for theirs, ours in (("gate", gate), ("up", "up"), ("down", "project")):
            yield from _linear(f"{a}.mlp.{theirs}_proj", f"{b}.mlp.{ours}", bias=mlp_bias)
    yield Link("model.norm.weight", ("norm.weight",))
    if not content.get("tie_word_embeddings", False):
        yield Link("lm_head.weight", ("head.weight",))
