"""Finds a family of transformers that computes the same as a model: its config.json, read again, gives the same settings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import as_flag
from lit_llm.hf.families import FAMILIES
from lit_llm.hf.families.config_parts import attention_scale, embedding_scale
from lit_llm.hf.families.family import BIASES, Family
from lit_llm.hf.families.layers import layer_settings
from lit_llm.hf.fields import Fields
from lit_llm.models.config import LayerSettings
from lit_llm.models.gpt import GPTConfig

_NOT_COMPUTED = {
    *("dropout", "init_std", "zero_init_projections", "base_width", "base_depth", "pad_vocab_to", "mask_documents", "eos_id"),
    *("predict_ahead", "bias"),
}
"""Settings that are not compared, because they do not change the logits of one document. `qkv_bias` etc. stand for `bias`."""
_NOT_OF_EXPERTS = {"balance", "sequence_balance", "z_loss", "first_dense", "every"}
"""Settings of `moe` that are not compared: they affect only training, or choose the layers with experts, which `computation`
lists under `experts`."""
_PART_OF = {
    "gelu_approximate": "mlp",
    **dict.fromkeys(("norm_bias", "norm_unit_offset"), "norm"),
    "qk_norm_width": "qk_norm",
    **dict.fromkeys(("partial_rotary_factor", "rope", "rope_theta", "rope_scaling"), "position"),
}
"""Setting → another setting, on which the first one's meaning depends. If both differ, only that other setting is reported."""
_ADDED_BIASES = {f"{part}_bias" for part in BIASES}


class Difference(NamedTuple):
    """Record of a setting that a family cannot express: its value in our model, and in the family's nearest model."""

    setting: str
    ours: Any
    theirs: Any

    @property
    def is_added_bias(self) -> bool:
        """Whether the setting is a bias that the family has and our model lacks. Export writes zeros for such a bias."""
        return self.setting in _ADDED_BIASES and self.theirs is True


def equivalent_family(config: GPTConfig, preferred: str | None) -> Family:
    """Return a family that computes the same as the model, if possible one that needs no added bias of zeros.

    Args:
        preferred: the `model_type` to take if several families compute the same. None: the first in `FAMILIES`.

    Raises:
        UserError: no family computes the same; one sentence for each setting that the nearest family lacks.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    differences = {family.model_type: _differences(config, family) for family in families}
    for bias_may_be_added in (False, True):
        for family in families:
            if all(bias_may_be_added and each.is_added_bias for each in differences[family.model_type]):
                return family

    def distance(family: Family) -> tuple[bool, int]:
        family_differences = differences[family.model_type]
        return any(each.setting == "moe" for each in family_differences), len(family_differences)

    nearest = min(families, key=distance)
    raise UserError(
        "\n".join(
            f"model.{each.setting} {as_flag(each.ours)} has no equivalent in {nearest.architecture} "
            f"(--model.{each.setting} {as_flag(each.theirs)}, or --format code)"
            for each in differences[nearest.model_type]
            if not each.is_added_bias
        )
    )


def _differences(config: GPTConfig, family: Family) -> list[Difference]:
    again = GPTConfig(**family.read(Fields(family.write(config))))
    ours, theirs = computation(config), computation(again)
    differences = {}
    for name in (name for name in ours if name in theirs):
        decisive = _PART_OF.get(name)
        if not _equal(ours[name], theirs[name]) and (decisive is None or _equal(ours[decisive], theirs[decisive])):
            varies = any(name in (each.layers or {}) for each in (config, again))
            if name == "experts":
                differences[name] = Difference("layers", {name: ours[name]}, {name: theirs[name]})
            elif varies or name == "rope":
                differences["layers"] = Difference("layers", config.layers, again.layers)
            elif name in LayerSettings._fields:
                differences[name] = Difference(name, getattr(config, name), getattr(again, name))
            else:
                differences[name] = Difference(name, ours[name], theirs[name])
    return list(differences.values())


def computation(config: GPTConfig) -> dict[str, Any]:
    """Return {setting: value} of all settings that decide what a model computes; settings of layers have a value per layer. A
    setting whose None stands for another value has that value. None in the result means: no effect."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings |= {"n_kv_head": config.kv_heads, "head_dim": config.resolved_head_dim, "mlp_width": config.hidden_width}
    settings |= {f"{part}_bias": config.has_bias(part) for part in BIASES}
    settings["gelu_approximate"] = config.resolved_gelu_approximate if config.mlp in ("gelu", "geglu") else None
    settings["latent"] = None if config.latent is None else vars(config.latent)
    settings["attention_scale"] = attention_scale(config)
    settings["embedding_scale"] = embedding_scale(config)
    if config.norm == "rmsnorm":
        settings["norm_bias"] = None
    if not config.qk_norm:
        settings["qk_norm_width"] = None
    rotated = config.position == "rope"
    if not rotated:
        settings["partial_rotary_factor"] = None
    layers = layer_settings(config)
    settings |= _mixture(config)
    settings["experts"] = [layer.experts for layer in layers]
    if all(settings["experts"]):
        settings["mlp_width"] = None
    settings["window"] = [layer.window for layer in layers]
    settings["rope"] = [layer.rope or not rotated for layer in layers]
    settings["rope_theta"] = [layer.rope_theta if layer.rope else None for layer in layers]
    settings["rope_scaling"] = [_resolved(config, layer) if layer.rope else None for layer in layers]
    return {name: value for name, value in settings.items() if name not in {*_NOT_COMPUTED, "layers"}}


def _mixture(config: GPTConfig) -> dict[str, Any]:
    """Return {`moe.NAME`: value} of settings that decide what experts compute, and `moe`: a text, None without experts."""
    moe = config.moe
    if moe is None:
        return {"moe": None}
    settings = {f"moe.{name}": value for name, value in vars(moe).items() if name not in _NOT_OF_EXPERTS}
    settings["moe.expert_width"] = moe.width(config.hidden_width)
    settings["moe.shared_width"] = moe.width_of_shared(config.hidden_width)
    settings["moe.groups"], settings["moe.top_groups"] = moe.effective_groups
    return {**settings, "moe": f"{{experts: {moe.experts}, top_k: {moe.top_k}}}"}


def _resolved(config: GPTConfig, layer: LayerSettings) -> dict[str, Any] | None:
    """Return a layer's rotary scaling, a dict, with default values for missing keys; None without scaling."""
    if layer.rope_scaling is None:
        return None
    defaults: dict[str, Any] = {"rope_type": "llama3"}
    kind = layer.rope_scaling.get("rope_type")
    if kind == "yarn":
        defaults |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    if kind == "longrope":
        original = layer.rope_scaling["original_max_position_embeddings"]
        defaults["factor"] = config.block_size / original  # type: ignore[operator]  # a number: the model was built
    return defaults | layer.rope_scaling


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are equal. Floats may have a relative difference of 1e-12, because stored inverses are rounded."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)
