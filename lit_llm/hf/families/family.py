"""A model family: the settings that it fixes, the keys of config.json for its other settings, and the names of its tensors."""

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
    """Translates keys of config.json into settings of lit_llm, and these settings into the keys."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return settings of GPTConfig. `layers` has those that may vary with depth, as lists of a value per layer."""

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return keys of config.json. Settings that no key can express are left out; export notices when it reads the keys."""


@dataclass(frozen=True)
class Family:
    """A family of models. CONTRIBUTING.md says how to add one."""

    model_type: str
    architecture: str
    """Name of the model class in transformers."""
    parts: tuple[Part, ...]
    """Translate the settings in which models of the family differ."""
    tensors: Callable[[GPTConfig], Iterator[Link]] = decoder
    """Yields the links of a model's tensors, without its output head."""
    head: str = "lm_head.weight"
    """Name of the tensor of the output head, if the head is not tied to the embedding."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the family share."""
    tied: bool = False
    """Whether the head is tied to the embedding if `tie_word_embeddings` is missing."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of dropout rates."""
    all_dropouts: bool = False
    """Whether the keys in `dropouts` cover the three places of model.dropout, so that one rate can be kept."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key → the values that lit_llm supports. A missing key means the first value."""
    experts_in_one: bool = False
    """Whether a tensor in the folder has the matrices of all experts of a block."""
    ahead: str | None = None
    """The key with the number of layers after the last one that predict further tokens. These layers are not imported."""
    harmless: tuple[str, ...] = ()
    """Keys that, like those in `HARMLESS`, do not change what transformers computes."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """The settings of GPTConfig in a config.json. Problems are collected in `fields`."""
        settings: dict[str, Any] = dict(self.fixed)
        by_layer: dict[str, list[Any]] = {}
        for part in self.parts:
            part_settings = part.read(fields)
            by_layer |= part_settings.pop("layers", {})
            settings |= part_settings
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
        """Return the config.json of a model, without settings that the family cannot express."""
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
        """The keys that `read` did not read and that may change the model. Keys with empty values change nothing."""
        known = HARMLESS | fields.read | {*self.dropouts, *self.harmless}
        return [key for key, value in fields.content.items() if key not in known and not is_empty(value)]


BIASES: tuple[Literal["qkv", "attention_output", "mlp", "norm"], ...] = ("qkv", "attention_output", "mlp", "norm")
"""The parts of a block that may have biases of their own."""


def _with_one_bias(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `bias` equal to the MLP's, and settings of single parts only where these differ from it."""
    bias = settings.pop("mlp_bias", settings.get("bias", False))
    same = {f"{part}_bias" for part in BIASES if settings.get(f"{part}_bias") in (None, bias)}
    return {name: value for name, value in settings.items() if name not in same} | {"bias": bias}


def _without_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, with null instead of each scale that equals the value for which null stands."""
    width = settings.get("head_dim") or settings["n_embd"] // settings["n_head"] or 1
    if latent := settings.get("latent"):
        width = latent["nope_head_dim"] + latent["rope_head_dim"]
    defaults = {"attention_scale": width**-0.5, "embedding_scale": 1.0}
    return {name: None if name in defaults and value == defaults[name] else value for name, value in settings.items()}
