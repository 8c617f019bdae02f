"""Convert between config.json and GPTConfig. Settings without an equivalent are refused, never dropped.

Keys and their defaults are those of the configuration classes of transformers (5.23). Keys that are not read here do not
change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from lit_llm.errors import UserError
from lit_llm.models.gpt import GPTConfig

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The supported architectures by `model_type`."""

_GATED = {"swiglu": "silu", "geglu": "gelu", "relu2": "relu"}
"""GPTConfig.mlp → hidden_act. relu(Wx)² = relu(Wx)·(Wx) is a ReLU-gated MLP whose gate and up matrices are equal."""
_DROPOUTS = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}


LARGEST = 2**28
"""No size of a model in use comes near it, and the product of two fits the index of a tensor."""


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number. An integer may be too large for a float."""
    return type(value) in (int, float) and abs(value) < 1e300


def shown(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}…"


class Fields:
    """The keys of a config.json, and the problems found in them."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.problems: list[str] = []

    def size(self, name: str) -> int:
        """The value of a required key, which must be a whole number from 1 to `LARGEST`."""
        if self.content.get(name) is None:
            self.problems.append(f"'{name}' is missing")
            return 1
        return self.optional_size(name, 1)

    def optional_size(self, name: str, default: Any) -> Any:
        """The value of an optional key, a whole number from 1 to `LARGEST`; `default` if it is missing or null."""
        rule = f"a whole number from 1 to {LARGEST:,}"
        return self._checked(name, default, rule, lambda value: type(value) is int and 1 <= value <= LARGEST)

    def number(self, name: str, default: Any) -> Any:
        """The value of an optional key, a finite number."""
        return self._checked(name, default, "a finite number", is_number)

    def flag(self, name: str, default: bool) -> bool:
        """The value of an optional key, true or false."""
        value: bool = self._checked(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def only(self, name: str, known: Iterable[Any], default: Any) -> Any:
        """The value of an optional key, of which lit_llm supports only `known` values."""
        return self._checked(name, default, " or ".join(repr(k) for k in known), lambda value: value in known)

    def _checked(self, name: str, default: Any, rule: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.content.get(name)
        if value is None:
            return default
        if not accepts(value):
            self.problems.append(f"'{name}' is {shown(value)}, but lit_llm supports only {rule}")
            return default
        return value


def read_config(content: dict[str, Any]) -> tuple[GPTConfig, list[str]]:
    """The model of a parsed config.json, and notes on settings that affect only training.

    Raises:
        UserError: the architecture or some of its settings are not supported; one sentence per line.
    """
    family = content.get("model_type")
    if family is None:
        raise UserError("it has no 'model_type'")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(f"'model_type' is {shown(family)}, but lit_llm can import only {', '.join(ARCHITECTURES)}")
    fields = Fields(content)
    if "quantization_config" in content:
        fields.problems.append("'quantization_config': quantised weights cannot be trained; import the original ones")
    settings = _read_gpt2(fields) if family == "gpt2" else _read_llama_like(fields, family)
    settings["vocab_size"] = fields.size("vocab_size")
    eos = content.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is int and 0 <= eos < settings["vocab_size"]:
        settings["eos_id"] = eos
    settings["init_std"] = fields.number("initializer_range", 0.02)
    settings["tie_embeddings"] = fields.flag("tie_word_embeddings", family == "gpt2")
    dropouts = {name: fields.number(name, 0.0) for name in _DROPOUTS.get(family, ("attention_dropout",))}
    notes = []
    if len(set(dropouts.values())) == 1 and family == "gpt2":
        settings["dropout"] = dropouts["resid_pdrop"]
    elif any(dropouts.values()):
        notes.append(f"dropout is set to 0: lit_llm has a single rate, but config.json has {dropouts} (fit --model.dropout)")
    config = GPTConfig(**settings)
    problems = fields.problems or config.problems()
    if problems:
        raise UserError("\n".join(problems))
    return config, notes


def _read_gpt2(fields: Fields) -> dict[str, Any]:
    fields.only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    fields.only("scale_attn_weights", (True,), True)
    fields.only("scale_attn_by_inverse_layer_idx", (False,), False)
    fields.only("add_cross_attention", (False,), False)
    return {
        "n_layer": fields.size("n_layer"),
        "n_head": fields.size("n_head"),
        "n_embd": fields.size("n_embd"),
        "block_size": fields.size("n_positions"),
        "mlp_width": fields.optional_size("n_inner", None),
        "mlp": "gelu",
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "position": "learned",
        "bias": True,
        "qk_norm": False,
    }


def _read_llama_like(fields: Fields, family: str) -> dict[str, Any]:
    n_layer, n_head, n_embd = (fields.size(f"{name}") for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kv_heads = fields.optional_size("num_key_value_heads", n_head)
    head_dim = fields.optional_size("head_dim", 128 if family == "qwen3" else None)
    bias = fields.only("attention_bias", (False, True) if family == "llama" else (False,), False)
    if family == "llama" and fields.flag("mlp_bias", False) != bias:
        fields.problems.append("'attention_bias' and 'mlp_bias' differ, but lit_llm has biases in both or in neither")
    act = fields.only("hidden_act", _GATED.values(), "silu")
    settings = {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": None if kv_heads == n_head else kv_heads,
        "n_embd": n_embd,
        "head_dim": None if head_dim is not None and head_dim * n_head == n_embd else head_dim,
        "block_size": fields.size("max_position_embeddings"),
        "mlp": next((mlp for mlp, name in _GATED.items() if name == act), "swiglu"),
        "mlp_width": fields.size("intermediate_size"),
        "norm": "rmsnorm",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "position": "rope",
        "bias": bias,
        "qkv_bias": True if family == "qwen2" else None,
        "qk_norm": family == "qwen3",
        "window": _window(fields, family, n_layer),
    }
    return settings | _rope(fields)


def _window(fields: Fields, family: str, n_layer: int) -> int | None:
    if family == "mistral":  # null means no window; a missing key means 4096
        window: int | None = fields.optional_size("sliding_window", None if "sliding_window" in fields.content else 4096)
        return window
    if family == "llama" or not fields.flag("use_sliding_window", False):
        return None
    first = fields.number("max_window_layers", 28)
    known = ("sliding_attention", "full_attention")
    kinds = fields.content.get("layer_types")
    if kinds is None:
        kinds = [known[0]] * (first < n_layer) + [known[1]] * (first > 0)
    if not isinstance(kinds, list) or not kinds or any(kind not in known for kind in kinds):
        fields.problems.append(f"'layer_types' is {shown(kinds)}, but lit_llm supports only a list of {' and '.join(known)}")
        return None
    if len(set(kinds)) > 1:
        fields.problems.append(
            "'max_window_layers' or 'layer_types' give some layers a sliding window, but lit_llm supports all or none"
        )
    return fields.optional_size("sliding_window", 4096) if kinds[0] == "sliding_attention" else None


def _rope(fields: Fields) -> dict[str, Any]:
    # Version 5 has everything in rope_parameters. Version 4 had rope_theta and rope_scaling (with rope_type or type).
    rope = fields.content.get("rope_parameters") or fields.content.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        fields.problems.append(f"'rope_parameters' or 'rope_scaling' is {shown(rope)}, but must be an object")
        return {}
    theta = rope.get("rope_theta", fields.content.get("rope_theta", 10000.0))
    if not is_number(theta):
        fields.problems.append(f"'rope_theta' is {shown(theta)}, but lit_llm supports only a finite number")
        return {}
    found: dict[str, Any] = {"rope_theta": float(theta)}
    if rope.get("partial_rotary_factor", fields.content.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        fields.problems.append("'partial_rotary_factor' is not 1, but lit_llm rotates whole heads")
    kind = (
        "one per layer"
        if any(isinstance(v, dict) for v in rope.values())
        else rope.get("rope_type", rope.get("type", "default"))
    )
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if not is_number(rope.get(key))]
        fields.problems += [f"the rotary scaling needs a number '{key}', not {shown(rope.get(key))}" for key in missing]
        if not missing:
            found["rope_scaling"] = {key: float(rope[key]) for key in keys}
    elif kind != "default":
        fields.problems.append(f"'rope_type' is {shown(kind)}, but lit_llm supports only 'default' or 'llama3'")
    return found


def write_config(config: GPTConfig) -> tuple[dict[str, Any], list[str]]:
    """The config.json of the equivalent architecture, and notes on its remaining differences.

    Raises:
        UserError: no architecture is equivalent; one sentence for each setting without an equivalent.
    """
    family = _family(config)
    content = _write_gpt2(config) if family == "gpt2" else _write_llama_like(config, family)
    content |= {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
    }
    notes = []
    if config.mask_documents:
        notes.append(
            "model.mask_documents cannot be exported: in transformers attention crosses document boundaries, so logits differ "
            "after an end-of-text token"
        )
    if family != "gpt2" and config.dropout:
        notes.append(
            f"model.dropout {config.dropout} cannot be exported: {ARCHITECTURES[family]} has dropout on attention weights only"
        )
    if family != "gpt2" and config.mlp == "relu2":
        notes.append("model.mlp relu2 is exported as a ReLU-gated MLP with two equal matrices: same outputs, larger files")
    return content, notes


def _family(config: GPTConfig) -> str:
    found = []

    def unsupported(what: str, setting: str, instead: str) -> None:
        found.append(f"model.{setting} {getattr(config, setting)} has no equivalent in {what} (--model.{setting} {instead})")

    if config.logit_softcap is not None:
        unsupported("any matching architecture of transformers", "logit_softcap", "null")
    if config.position == "learned":
        what = "GPT2LMHeadModel, which has learned positions"
        for setting, wanted in (("norm", "layernorm"), ("mlp", "gelu"), ("qk_norm", False), ("window", None)):
            if getattr(config, setting) != wanted:
                unsupported(what, setting, "null" if wanted is None else str(wanted).lower())
        if config.kv_heads != config.n_head:
            unsupported(what, "n_kv_head", "null")
        if config.resolved_head_dim * config.n_head != config.n_embd:
            unsupported(what, "head_dim", "null")
        family = "gpt2"
    else:
        what = "the architectures with rotary positions (LLaMA, Mistral, Qwen)"
        if config.norm != "rmsnorm":
            unsupported(what, "norm", "rmsnorm")
        if config.mlp not in _GATED:
            unsupported(what, "mlp", "swiglu, geglu or relu2")
        some_bias = config.bias or bool(config.qkv_bias)
        if config.bias and config.qkv_bias is False:
            unsupported(what, "qkv_bias", "null")
        elif config.bias and (config.qk_norm or config.window is not None):
            unsupported("Mistral and Qwen3 (model.qk_norm, model.window)", "bias", "false")
        family = "llama"
        if config.qk_norm:
            family = "qwen3"
        elif some_bias and not config.bias:
            family = "qwen2"
        elif config.window is not None:
            family = "mistral"
    if found:
        raise UserError("\n".join(found))
    return family


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "n_inner": config.hidden_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(_DROPOUTS["gpt2"], config.dropout),
    }


def _write_llama_like(config: GPTConfig, family: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "hidden_size": config.n_embd,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.hidden_width,
        "hidden_act": _GATED[config.mlp],
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        # The keys of version 4, which version 5 reads too.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else {"rope_type": "llama3", **_whole(config.rope_scaling)},
    }
    if family == "llama":
        content |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    elif family == "mistral":
        content["sliding_window"] = config.window
    else:
        windowed = config.window is not None
        content |= {"use_sliding_window": windowed, "sliding_window": config.window}
        content["max_window_layers"] = 0 if windowed else config.n_layer  # the first layer with a window
    if family == "qwen3":
        content["attention_bias"] = bool(config.qkv_bias)
    return content


def _whole(scaling: dict[str, float]) -> dict[str, float | int]:
    """`scaling` with original_max_position_embeddings as an integer, which transformers requires."""
    return {
        key: int(value) if key.startswith("original") and math.floor(value) == value else value
        for key, value in scaling.items()
    }
