"""Parts of families: each translates some keys of config.json to settings of lit_llm and back (`family.Part`).

In each part, `ours` is the name of a setting of lit_llm, and `theirs` the key in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lit_llm.core.number_domain import Domain
from lit_llm.hf.fields import Fields
from lit_llm.models.config import MODEL_DOMAINS
from lit_llm.models.experts_config import MOE_DOMAINS
from lit_llm.models.gpt import GPTConfig

_DOMAINS = {**MODEL_DOMAINS, **MOE_DOMAINS}


@dataclass(frozen=True)
class Setting:
    """`Part` of a family: translates one number or bool. Our setting `ours` equals the key `theirs` in config.json."""

    ours: str
    theirs: str
    kind: Literal["required size", "size", "number", "flag"] = "required size"
    default: Any = None
    """The value that transformers takes if config.json lacks the key."""
    nullable: bool = False
    """Whether null in config.json means None. If False, null means the default."""
    resolved: Callable[[GPTConfig], Any] | None = None
    """A function that returns the value to write, if a None of our setting means another value. None: write our value."""

    def read(self, fields: Fields) -> dict[str, Any]:
        if self.kind == "required size":
            return {self.ours: fields.size(self.theirs)}
        if self.kind == "flag":
            return {self.ours: fields.flag(self.theirs, self.default)}
        default = None if self.nullable and fields.has(self.theirs) else self.default
        if self.kind == "size":
            return {self.ours: fields.optional_size(self.theirs, default)}
        return {self.ours: fields.number(self.theirs, default, _DOMAINS[self.ours])}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: getattr(config, self.ours) if self.resolved is None else self.resolved(config)}


@dataclass(frozen=True)
class Inverse:
    """`Part` of a family: translates one number. The value of the key `theirs` in config.json is 1 / our setting `ours`."""

    ours: str
    theirs: str

    def read(self, fields: Fields) -> dict[str, Any]:
        domain = MODEL_DOMAINS[self.ours]
        return {self.ours: 1.0 / fields.number(self.theirs, 1.0, Domain(1.0 / domain.high, domain.high))}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        return {self.theirs: 1.0 / getattr(config, self.ours)}


@dataclass(frozen=True)
class Heads:
    """`Part` of a family: translates the numbers of query and of key heads, and the widths of a head and of the model. Fields:
    the names of the keys in config.json."""

    query: str = "num_attention_heads"
    key_value: str | None = "num_key_value_heads"
    """The key for the number of key and value heads. None: as many as query heads."""
    head_dim: str | None = "head_dim"
    """The key for the width of a head. None: the width is the model's width / number of query heads."""
    width: str = "hidden_size"
    default_head_dim: int | None = None

    def read(self, fields: Fields) -> dict[str, Any]:
        n_head, n_embd = fields.size(self.query), fields.size(self.width)
        kv = n_head if self.key_value is None else fields.optional_size(self.key_value, n_head)
        head_dim = None if self.head_dim is None else fields.optional_size(self.head_dim, self.default_head_dim)
        return {
            "n_head": n_head,
            "n_embd": n_embd,
            "n_kv_head": None if kv == n_head else kv,
            "head_dim": None if head_dim is not None and head_dim * n_head == n_embd else head_dim,
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        content = {self.query: config.n_head, self.width: config.n_embd}
        if self.key_value is not None:
            content[self.key_value] = config.kv_heads
        if self.head_dim is not None:
            content[self.head_dim] = config.resolved_head_dim
        return content


GATED: dict[str, tuple[str, str | None]] = {
    "silu": ("swiglu", None),
    "gelu": ("geglu", "none"),
    "gelu_pytorch_tanh": ("geglu", "tanh"),
    "gelu_new": ("geglu", "tanh"),
    # relu(Wx)² = relu(Wx)·(Wx) is a ReLU-gated MLP whose gate and up matrices are equal.
    "relu": ("relu2", None),
}
"""Activation in config.json → our (`mlp`, `gelu_approximate`) for an MLP with a gate."""
EXPERTS = {name: mlp for name, mlp in GATED.items() if name != "relu"}
"""Activation in config.json → our (`mlp`, `gelu_approximate`) for experts."""
PLAIN: dict[str, tuple[str, str | None]] = {
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu_fast": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "relu2": ("relu2", None),
}
"""Activation in config.json → our (`mlp`, `gelu_approximate`) for an MLP of two matrices."""
_DEFAULTS = {"gelu": "tanh", "geglu": "none"}
"""Our `mlp` → the value of `gelu_approximate` that its default, None, means."""


@dataclass(frozen=True)
class Activation:
    """`Part` of a family: translates the activation. `known`: {value of the key `theirs`: our (`mlp`, `gelu_approximate`)}."""

    theirs: str
    known: Mapping[str, tuple[str, str | None]]
    default: str

    def read(self, fields: Fields) -> dict[str, Any]:
        mlp, approximate = self.known[fields.only(self.theirs, tuple(self.known), self.default)]
        return {"mlp": mlp, "gelu_approximate": None if approximate == _DEFAULTS.get(mlp) else approximate}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        wanted = config.mlp, config.resolved_gelu_approximate if config.mlp in _DEFAULTS else None
        names = (self.default, *self.known)
        return {self.theirs: next((name for name in names if self.known[name] == wanted), self.default)}


Bias: TypeAlias = Literal["qkv", "attention_output", "mlp", "norm"]


@dataclass(frozen=True)
class Biases:
    """`Part` of a family: translates a bool, whether all parts `ours` of a block have biases. `write` gives true if any has."""

    theirs: str
    ours: tuple[Bias, ...]
    default: bool = False

    def read(self, fields: Fields) -> dict[str, Any]:
        return dict.fromkeys((f"{part}_bias" for part in self.ours), fields.flag(self.theirs, self.default))

    def write(self, config: GPTConfig) -> dict[str, Any]:
        return {self.theirs: any(config.has_bias(part) for part in self.ours)}


ATTENTION_BIASES: tuple[Bias, ...] = ("qkv", "attention_output")


def attention_scale(config: GPTConfig) -> float:
    """Return the factor by which a model multiplies attention scores. `attention_scale` None means 1 / √head_dim."""
    return config.resolved_head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def embedding_scale(config: GPTConfig) -> float:
    """Return the factor by which a model multiplies embeddings. `embedding_scale` None means 1."""
    return 1.0 if config.embedding_scale is None else config.embedding_scale
