"""What a model family is: which settings it fixes, which keys of config.json give the others, and where its tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lit_llm.core.number_domain import whole
from lit_llm.hf.families.layers import with_patterns
from lit_llm.hf.fields import HARMLESS, Fields, is_empty, shown
from lit_llm.hf.tensor_map import Link, decoder
from lit_llm.models.config import MODEL_DOMAINS
from lit_llm.models.gpt import GPTConfig


class Part(Protocol):
    """Some settings and the keys of config.json that they have, in both directions."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """Settings of GPTConfig. What may vary with depth is in `layers`, as a list with one value for each layer."""

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Keys of config.json. A setting that they cannot express is left out: export compares what `read` makes of them."""


@dataclass(frozen=True)
class Family:
    """A family of models. CONTRIBUTING.md says how to add one."""

    model_type: str
    architecture: str
    """The class of transformers."""
    parts: tuple[Part, ...]
    """Settings that differ between models of the family."""
    tensors: Callable[[GPTConfig], Iterator[Link]] = decoder
    """The tensors of a model, without its output head."""
    head: str = "lm_head.weight"
    """The output head, if it is not tied."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the family share."""
    tied: bool = False
    """Whether embeddings are tied if `tie_word_embeddings` is missing."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """The keys of dropout rates."""
    all_dropouts: bool = False
    """Whether the keys in `dropouts` cover the three places of model.dropout, so that one rate can be kept."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of which lit_llm supports only some values. The first one is the default."""
    experts_in_one: bool = False
    """Whether a tensor has the matrices of all experts."""
    ahead: str | None = None
    """The key with the number of layers after the last that predict further tokens: they are not imported."""
    harmless: tuple[str, ...] = ()
    """Further keys that do not change what transformers computes."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """The settings of GPTConfig in a config.json. Problems are collected in `fields`."""
        settings: dict[str, Any] = dict(self.fixed)
        by_layer: dict[str, list[Any]] = {}
        for part in self.parts:
            found = part.read(fields)
            by_layer |= found.pop("layers", {})
            settings |= found
        settings |= with_patterns(by_layer, settings["block_size"])
        for name, known in {**self.only, "is_encoder_decoder": (False,), "add_cross_attention": (False,)}.items():
            fields.only(name, known, known[0])
        if self.ahead is not None:
            fields.number(self.ahead, 0, whole(0, 64))
        settings["vocab_size"] = fields.size("vocab_size")
        settings["init_std"] = fields.number("initializer_range", 0.02, MODEL_DOMAINS["init_std"])
        settings["tie_embeddings"] = fields.flag("tie_word_embeddings", self.tied)
        eos = fields.raw("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if eos is not None and type(eos) is not int:
            fields.refuse(f"'eos_token_id' is {shown(eos)}, but must be an id or a list of ids")
        elif eos is not None and 0 <= eos < settings["vocab_size"]:
            settings["eos_id"] = eos
        return _without_defaults(_with_one_bias(settings))

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """The config.json of a model, without settings that the family cannot express."""
        content: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tie_embeddings,
            "pad_token_id": None,  # the default of a family may exceed the vocabulary
        }
        for part in self.parts:
            content |= part.write(config)
        if self.ahead is not None:
            content[self.ahead] = 0
        return content | dict.fromkeys(self.dropouts, config.dropout if self.all_dropouts else 0.0)

    def unknown_keys(self, fields: Fields) -> list[str]:
        """The keys that nobody read after `read` and that may change the model. Empty values change nothing."""
        known = HARMLESS | fields.read | {*self.dropouts, *self.harmless}
        return [key for key, value in fields.content.items() if key not in known and not is_empty(value)]


BIASES: tuple[Literal["qkv", "attention_output", "mlp", "norm"], ...] = ("qkv", "attention_output", "mlp", "norm")
"""The parts of a block that may have biases of their own."""


def _with_one_bias(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `bias` for as many parts as possible, and the settings of single parts where they differ from it."""
    bias = settings.pop("mlp_bias", settings.get("bias", False))
    same = {f"{part}_bias" for part in BIASES if settings.get(f"{part}_bias") in (None, bias)}
    return {name: value for name, value in settings.items() if name not in same} | {"bias": bias}


def _without_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with null for the scales that null stands for."""
    width = settings.get("head_dim") or settings["n_embd"] // settings["n_head"] or 1
    if latent := settings.get("latent"):
        width = latent["nope_head_dim"] + latent["rope_head_dim"]
    defaults = {"attention_scale": width**-0.5, "embedding_scale": 1.0}
    return {name: None if name in defaults and value == defaults[name] else value for name, value in settings.items()}
