"""Rotary settings in config.json: `rope_parameters` of transformers 5, or `rope_theta`, `rope_scaling` of transformers 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_llm.hf.families.layers import FULL, SLIDING, kinds_of, layer_kinds, layer_settings
from lit_llm.hf.fields import Fields, is_number, shown
from lit_llm.models.config import MODEL_DOMAINS, LayerSettings
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.rope_scaling import ROPE_SCALING, value_problem

_ORIGINAL = "original_max_position_embeddings"
_OTHER_NAMES = {"su": "longrope"}
_THETA = MODEL_DOMAINS["rope_theta"]
_MSCALE = ("mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Rope:
    """`Part` of a family: translates rotary settings that all layers share. `theta`: the key for the rotary base;
    `default_theta`: the base without this key."""

    default_theta: float = 10000.0
    theta: str = "rope_theta"
    partial: str | None = None
    """The key for the fraction of a head's dimensions that is rotated. None: the family rotates whole heads."""
    default_partial: float = 1.0
    default_original: int | None = None
    """Default of a top-level key `original_max_position_embeddings`, which overrides the same key in the rotary settings. None:
    the family has no such top-level key."""
    scalings: tuple[str, ...] = tuple(ROPE_SCALING)
    """The supported rope_types, in addition to "default"."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """The rotary settings that transformers takes if config.json lacks rotary settings."""

    def read(self, fields: Fields) -> dict[str, Any]:
        older, newer = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
        rope = dict(older or newer or self.default)  # the order of transformers
        top = None if self.default_original is None else fields.optional_size(_ORIGINAL, self.default_original)
        if top is not None:
            rope[_ORIGINAL] = top
        domain = MODEL_DOMAINS["partial_rotary_factor"]
        partial = fields.number(self.partial or "partial_rotary_factor", self.default_partial, domain)
        partial = rope.pop("partial_rotary_factor", partial)
        if not domain.accepts(partial):
            fields.refuse(f"'partial_rotary_factor' is {shown(partial)}, but must be {domain.rule(partial)}")
            partial = 1.0
        if partial != 1.0 and self.partial is None:
            fields.refuse(f"'partial_rotary_factor' is {shown(partial)}, but this family rotates whole heads")
            partial = 1.0
        theta, scaling = _read_one(fields, rope, fields.number(self.theta, self.default_theta, _THETA), self.scalings)
        settings = {"rope_theta": theta, "rope_scaling": scaling}
        return settings if partial == 1.0 else settings | {"partial_rotary_factor": float(partial)}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        # The keys of version 4, which version 5 reads too.
        layer = config.layer(0)
        content: dict[str, Any] = {self.theta: layer.rope_theta, "rope_scaling": _scaling(config, layer)}
        if self.default and layer.rope_scaling is None:
            content["rope_scaling"] = {"rope_type": "default"}
        if self.partial is not None:
            content[self.partial] = config.partial_rotary_factor
        if self.default_original is not None:
            original = (content["rope_scaling"] or {}).pop(_ORIGINAL, None)
            content[_ORIGINAL] = self.default_original if original is None else original
        return content


@dataclass(frozen=True)
class RopeByKind:
    """`Part` of a family: translates two sets of rotary settings, for layers with full attention and with a sliding window."""

    default_kinds: Callable[[int], list[str]]
    default_theta: float
    default_sliding_theta: float
    sliding_theta: str
    """The key of transformers 4 for the rotary base (theta) in layers with a sliding window."""

    def read(self, fields: Fields) -> dict[str, Any]:
        kinds = layer_kinds(fields, self.default_kinds)
        nested, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
        bases = {
            FULL: fields.number("rope_theta", self.default_theta, _THETA),
            SLIDING: fields.number(self.sliding_theta, self.default_sliding_theta, _THETA),
        }
        for name, value in nested.items():
            if name not in (FULL, SLIDING) or not (value is None or isinstance(value, dict)):
                fields.refuse(f"'rope_parameters' has '{name}', but lit_llm supports only objects {FULL} and {SLIDING}")
                return {}
        full = (nested.get(FULL) or {}) | older
        rope = {
            kind: _read_one(fields, dict(own), bases[kind])
            for kind, own in ((FULL, full), (SLIDING, nested.get(SLIDING) or {}))
        }
        return {
            "layers": {
                "rope_theta": [rope[kind][0] for kind in kinds],
                "rope_scaling": [rope[kind][1] for kind in kinds],
            }
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        layers, kinds = layer_settings(config), kinds_of(config)
        full = layers[kinds.index(FULL) if FULL in kinds else 0]
        sliding = layers[kinds.index(SLIDING)] if SLIDING in kinds else full
        nested = {
            kind: {"rope_theta": layer.rope_theta, **(_scaling(config, layer) or {"rope_type": "default"})}
            for kind, layer in ((FULL, full), (SLIDING, sliding))
        }
        content = {"rope_parameters": nested, self.sliding_theta: sliding.rope_theta}
        return content | {"rope_theta": full.rope_theta, "rope_scaling": _scaling(config, full)}


def _read_one(
    fields: Fields, rope: dict[str, Any], theta: float, known: Collection[str] = tuple(ROPE_SCALING)
) -> tuple[float, dict[str, Any] | None]:
    """Return (rotary base, value of `GPTConfig.rope_scaling`) from `rope`, an object of rotary settings in config.json.

    Args:
        theta: The base if `rope` has no rope_theta.
        known: The supported rope_types, in addition to "default".
    """
    own = rope.pop("rope_theta", None)
    theta = theta if own is None else own
    if not _THETA.accepts(theta):
        fields.refuse(f"'rope_theta' is {shown(theta)}, but must be {_THETA.rule(theta)}")
        return 1.0, None
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or older or "default"
    kind = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ("default", *known):
        fields.refuse(f"'rope_type' is {shown(kind)}, but lit_llm supports only default, {', '.join(known)}")
        return float(theta), None
    required, optional = ROPE_SCALING.get(kind, (set(), set()))
    _add_missing(fields, rope, kind)
    if kind == "yarn":
        _resolve_mscale(rope)
    values = {key: rope.pop(key) for key in sorted(required | optional) if rope.get(key) is not None}
    for key in sorted(required - values.keys()):
        fields.refuse(f"the rotary scaling {kind} needs '{key}', which is missing")
    wrong = {key: problem for key, value in values.items() if (problem := value_problem(key, value))}
    for key, problem in wrong.items():
        fields.refuse(f"in the rotary scaling {kind}, '{key}' {problem}")
    if wrong:
        return float(theta), None
    for key, value in rope.items():
        if value is not None and key != _ORIGINAL:
            fields.refuse(f"the rotary scaling {kind} has '{key}' = {shown(value)}, which lit_llm does not know")
    if kind == "default":
        return float(theta), None
    scaling = {key: value if isinstance(value, bool | list) else float(value) for key, value in values.items()}
    return float(theta), scaling if kind == "llama3" else {"rope_type": kind, **scaling}


def _add_missing(fields: Fields, rope: dict[str, Any], kind: str) -> None:
    """In `rope`, rotary settings of `kind` llama3, yarn or longrope, set a missing original context length to
    `max_position_embeddings` and, except for llama3, a missing factor to `max_position_embeddings` / original length."""
    longest = fields.optional_size("max_position_embeddings", 1)
    if kind not in ("llama3", "yarn", "longrope"):
        return
    if rope.get(_ORIGINAL) is None:
        rope[_ORIGINAL] = longest
    original = rope[_ORIGINAL]
    if kind != "llama3" and rope.get("factor") is None and is_number(original) and original > 0:
        rope["factor"] = longest / original


def _resolve_mscale(rope: dict[str, Any]) -> None:
    """In the YaRN settings `rope`, remove mscale and mscale_all_dim; if missing, set the attention_factor that both imply."""
    scales = [rope.get(name) for name in _MSCALE]
    if any(scale is not None and not is_number(scale) for scale in scales) or not is_number(rope.get("factor")):
        return
    for name in _MSCALE:
        rope.pop(name, None)
    if all(scales) and rope.get("attention_factor") is None:
        logarithm = math.log(max(rope["factor"], 1.0))
        above, below = (0.1 * scale * logarithm + 1.0 for scale in scales if scale is not None)
        rope["attention_factor"] = above / below


def _scaling(config: GPTConfig, layer: LayerSettings) -> dict[str, Any] | None:
    """Return the rotary scaling of a layer as `rope_scaling` of transformers' config.json; None without scaling."""
    if layer.rope_scaling is None:
        return None
    scaling: dict[str, Any] = {"rope_type": "llama3", **layer.rope_scaling}
    original = scaling.get(_ORIGINAL)
    if isinstance(original, float) and original.is_integer():
        scaling[_ORIGINAL] = int(original)  # transformers requires an integer
    if scaling["rope_type"] == "longrope" and scaling.get("factor") == config.block_size / scaling[_ORIGINAL]:
        del scaling["factor"]  # version 4 knows only this value
    return scaling
