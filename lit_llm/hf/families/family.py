"""The class of a model family: settings that it fixes, keys of config.json for other settings, and names of tensors."""

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
    """Interface of the parts of a `Family`. A part translates some keys of config.json to settings of GPTConfig and back."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return {setting of GPTConfig: value}. Its entry `layers` is {setting: list of its value in each layer}."""

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return {key of config.json: value}. Settings that no key can express are left out; export then refuses the model."""


@dataclass(frozen=True)
class Family:
    """Description of a model family of transformers. It reads and writes config.json. CONTRIBUTING.md says how to add one."""

    model_type: str
    architecture: str
    """Name of the model class in transformers."""
    parts: tuple[Part, ...]
    """Objects that translate the settings in which models of the family differ."""
    tensors: Callable[[GPTConfig], Iterator[Link]] = decoder
    """A function that yields the links of a model's tensors, except the output head."""
    head: str = "lm_head.weight"
    """Name of the output head's tensor in transformers. Unused if the head is tied to the embedding."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Setting of GPTConfig → the value that all models of the family share."""
    tied: bool = False
    """Whether the output head is tied to the embedding if config.json lacks `tie_word_embeddings`."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of config.json for dropout rates."""
    all_dropouts: bool = False
    """Whether the keys in `dropouts` cover all places where model.dropout drops: embeddings, attention, residual updates."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key of config.json → the values that lit_llm supports. A missing key means the first value."""
    experts_in_one: bool = False
    """Whether a tensor in the folder has the matrices of all experts of a block."""
    ahead: str | None = None
    """The key for the number of additional layers that predict further tokens, which are not imported. None: no such key."""
    harmless: tuple[str, ...] = ()
    """Further keys of config.json, beside `fields.HARMLESS`, that do not change what transformers computes."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return {setting of GPTConfig: value} from a config.json. Add problems to `fields.problems`."""
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
        """Return the content of config.json for a model, without settings that the family cannot express."""
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
        """Return the keys of config.json that are not empty, were not read by `read`, and are not known to be harmless."""
        known = HARMLESS | fields.read | {*self.dropouts, *self.harmless}
        return [key for key, value in fields.content.items() if key not in known and not is_empty(value)]


BIASES: tuple[Literal["qkv", "attention_output", "mlp", "norm"], ...] = ("qkv", "attention_output", "mlp", "norm")
"""The parts of a block whose biases have settings of their own, such as `qkv_bias`."""


def _with_one_bias(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` with `mlp_bias`, if set, renamed `bias`. Others, as `qkv_bias`, stay only where they differ from it."""
    bias = settings.pop("mlp_bias", settings.get("bias", False))
    same = {f"{part}_bias" for part in BIASES if settings.get(f"{part}_bias") in (None, bias)}
    return {name: value for name, value in settings.items() if name not in same} | {"bias": bias}


def _without_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings` in which a scale of attention or of embeddings that equals its default is None."""
    width = settings.get("head_dim") or settings["n_embd"] // settings["n_head"] or 1
    if latent := settings.get("latent"):
        width = latent["nope_head_dim"] + latent["rope_head_dim"]
    defaults = {"attention_scale": width**-0.5, "embedding_scale": 1.0}
    return {name: None if name in defaults and value == defaults[name] else value for name, value in settings.items()}
