"""The shape of a model as plain numbers, and the parameters of each part.

Symbols: L blocks, d width, H query heads, K key/value heads, h head width, f hidden width of the MLP, T context length, V
vocabulary rows including padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The fields of `lit_llm.models.gpt.GPTConfig` that affect sizes. `vocab_size` must be known."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    n_kv_head: int | None = None
    mlp: str = "relu2"
    mlp_width: int | None = None
    norm: str = "rmsnorm"
    position: str = "rope"
    bias: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    qk_norm: bool = True
    window: int | None = None
    logit_softcap: float | None = None
    pad_vocab_to: int = 64
    mask_documents: bool = False
    head_dim: int | None = None
    qkv_bias: bool | None = None

    @classmethod
    def of(cls, config: Any, **changes: Any) -> ModelShape:
        """The shape of a `GPTConfig`, or of any object with the same fields."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)} | changes)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def query_width(self) -> int:
        """H·h, which is d unless head_dim is set."""
        return self.n_head * self.resolved_head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.resolved_head_dim

    @property
    def hidden_width(self) -> int:
        return self.mlp_width or 4 * self.n_embd

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to


@dataclass(frozen=True)
class BlockMatrices:
    """Elements of each weight matrix of one block. Query, key and value are separate matrices."""

    query: int
    key: int
    value: int
    attention_project: int
    up: int
    gate: int
    mlp_project: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def block_matrices(model: ModelShape) -> BlockMatrices:
    """Elements: d·H·h, twice d·K·h, H·h·d, and two or three times d·f."""
    d, q, kv, f = model.n_embd, model.query_width, model.kv_width, model.hidden_width
    return BlockMatrices(d * q, d * kv, d * kv, q * d, d * f, d * f if model.gated else 0, d * f)


def _norm_parameters(model: ModelShape, width: int) -> int:
    return width * (2 if model.norm == "layernorm" and model.bias else 1)


def _column_biases(model: ModelShape) -> int:
    """Biases of one block's query, key, value, up and gate, which tensor parallelism splits."""
    qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
    attention = model.query_width + 2 * model.kv_width if qkv_bias else 0
    return attention + (model.hidden_width * (2 if model.gated else 1) if model.bias else 0)


def _block_biases(model: ModelShape) -> int:
    projections = 2 * model.n_embd if model.bias else 0
    return _column_biases(model) + projections


def parameters(model: ModelShape) -> dict[str, int]:
    """Parameters by part, exactly as in the built model. A tied head is counted with the embedding.

    A Llama-like block with multi-head attention, no biases, a 2-matrix MLP and f = 4d has 12d² + 2d parameters. The whole
    model with a tied head has 12Ld² + 2Ld + Vd + d (Kaplan et al. 2020, table 1, plus norms).
    """
    d, layers, matrices = model.n_embd, model.n_layer, block_matrices(model)
    parts = {
        "token embedding": model.padded_vocab_size * d,
        "position embedding": model.block_size * d if model.position == "learned" else 0,
        "attention": layers * (matrices.query + matrices.key + matrices.value + matrices.attention_project),
        "mlp": layers * (matrices.up + matrices.gate + matrices.mlp_project),
        "norms": (2 * layers + 1) * _norm_parameters(model, d) + (2 * layers * model.resolved_head_dim if model.qk_norm else 0),
        "biases": layers * _block_biases(model),
        "output head": 0 if model.tie_embeddings else model.padded_vocab_size * d,
    }
    return {name: count for name, count in parts.items() if count}


def total_parameters(model: ModelShape) -> int:
    """All parameters; a tied matrix counts once."""
    return sum(parameters(model).values())


def block_parameters(model: ModelShape) -> int:
    """Parameters of one block."""
    outside = ("token embedding", "position embedding", "output head")
    inside = sum(count for name, count in parameters(model).items() if name not in outside)
    return (inside - _norm_parameters(model, model.n_embd)) // model.n_layer


def parameters_by_group(model: ModelShape) -> dict[str, int]:
    """Parameters by optimizer group: matrix (hidden weights), embedding, vector."""
    parts = parameters(model)
    groups = {
        "matrix": parts["attention"] + parts["mlp"],
        "embedding": parts["token embedding"] + parts.get("position embedding", 0) + parts.get("output head", 0),
    }
    return groups | {"vector": sum(parts.values()) - sum(groups.values())}


def matmul_parameters(model: ModelShape) -> int:
    """Parameters in matrix products: all matrices of the blocks, and the output matrix once, tied or not."""
    return model.n_layer * block_matrices(model).total + model.padded_vocab_size * model.n_embd


def local_parameters(model: ModelShape, tensor_parallel: int) -> int:
    """Parameters on one of `tensor_parallel` ranks.

    Matrices, the biases of their output columns, embedding and head are split. Norms, positions and the biases of the two
    output projections are not.
    """
    parts = parameters(model)
    split = sum(parts.get(name, 0) for name in ("token embedding", "attention", "mlp", "output head"))
    split += model.n_layer * _column_biases(model)
    return sum(parts.values()) - split + split // tensor_parallel
