"""The models that a GGUF file can express: for each `model_type` of transformers, llama.cpp's architecture and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_llm.core.number_domain import shown
from lit_llm.hf.equivalence import computation
from lit_llm.models.gpt import GPTConfig

_EACH = (False, True)
_QKV_BIAS = {"qkv_bias": _EACH}
_BIASES = {**_QKV_BIAS, "attention_output_bias": _EACH, "mlp_bias": _EACH}
_UNTIED = {"tie_embeddings": (False,)}
_MOE = {"moe.normalise": (True,)}
_ONLY: dict[str, tuple[Any, ...]] = {
    **{"mlp": ("swiglu",), "gelu_approximate": (None, "tanh")},
    **dict.fromkeys(_BIASES, (False,)),
    **{"attention_softcap": (None,), "logit_softcap": (None,)},
}
"""Setting → the values that an architecture supports, unless its field `only` has other values."""


@dataclass(frozen=True)
class Architecture:
    """Record of an architecture of llama.cpp, and the settings of lit_llm's models that it supports."""

    name: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Setting → its supported values, instead of those in `_ONLY`. An empty tuple: any value."""
    pairs: bool = False
    """Whether rotary embedding pairs neighbouring dimensions. Rows of query and key weights then have another order."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """The supported rope_types of rotary scaling. No scaling is supported, too."""
    plain_heads: bool = False
    """Whether head_dim must be n_embd / n_head."""
    scales: bool = False
    """Whether the file has keys for the factors of embeddings, attention scores, residual updates and logits."""
    window_every: int | None = None
    """k: every k-th block has full attention, and the other blocks have a sliding window. None: no block has a window."""
    scaled_windows: bool = True
    """Whether rope_scaling applies also to blocks with a sliding window."""
    window_theta: bool = False
    """Whether blocks with a sliding window may have another rope_theta than blocks without."""

    def problems(self, config: GPTConfig) -> Iterator[str]:
        """Yield one sentence for each setting of a model that this architecture cannot express."""
        ours, none = computation(config), f"has no form in GGUF's {self.name}"
        for name, values in {**_ONLY, **self.only}.items():
            if values and ours[name] not in values:
                wanted = " or ".join("null" if value is None else str(value).lower() for value in values)
                yield f"model.{name} {shown(ours[name])} {none}, which has {wanted} (--model.{name})"
        if self.plain_heads and (config.resolved_head_dim * config.n_head != config.n_embd):
            yield f"model.head_dim {config.resolved_head_dim} {none} (--model.head_dim null)"
        if not self.scales and ours["attention_scale"] != config.resolved_head_dim**-0.5:
            yield f"model.attention_scale {config.attention_scale} {none} (--model.attention_scale null)"
        windows = [window is not None for window in ours["window"]]
        if any(windows) and windows != [bool((i + 1) % (self.window_every or 1)) for i in range(config.n_layer)]:
            yield f"model.window {config.window} in these blocks {none} (--model.window, --model.layers)"
        full = windows.index(False) if False in windows else 0
        theta, scaling = ours["rope_theta"][full], ours["rope_scaling"][full]
        for i, windowed in enumerate(windows):
            if windowed and not self.window_theta and ours["rope_theta"][i] != theta:
                yield f"model.layers.rope_theta {none} (--model.layers)"
            if windowed and ours["rope_scaling"][i] != (scaling if self.scaled_windows else None):
                yield f"model.layers.rope_scaling {none} (--model.layers)"
        if self.name == "smollm3" and ours["rope"] != [(i + 1) % 4 != 0 for i in range(config.n_layer)]:
            yield f"model.layers.rope {none}, where each 4th block has no rotary embedding (--model.layers)"
        if self.name == "qwen3moe" and not all(ours["experts"]):
            yield f"model.layers.experts {none}, where each block has experts (--model.layers)"
        kind = scaling and scaling["rope_type"]
        if kind is not None and kind not in self.scalings:
            yield f"model.rope_scaling.rope_type {kind} {none} (--model.rope_scaling null)"
        if kind == "yarn" and (not scaling["truncate"] or "attention_factor" in scaling):
            yield f"model.rope_scaling with attention_factor, or truncate false, {none} (--model.rope_scaling)"


ARCHITECTURES = {
    "llama": Architecture("llama", _BIASES, pairs=True, scalings=("linear", "yarn", "llama3")),
    "mistral": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2", _QKV_BIAS, plain_heads=True),
    "qwen3": Architecture("qwen3", _QKV_BIAS),
    "gpt2": Architecture("gpt2", _BIASES | {"mlp": ("gelu",)}, plain_heads=True),
    "olmo2": Architecture("olmo2", _UNTIED, plain_heads=True),
    "olmo3": Architecture("olmo2", _UNTIED, plain_heads=True, window_every=4, scaled_windows=False),
    "gemma2": Architecture(
        "gemma2",
        {"mlp": ("geglu",), "logit_softcap": (), "attention_softcap": (), "tie_embeddings": (True,)},
        window_every=2,
    ),
    "gemma3_text": Architecture(
        "gemma3", {"mlp": ("geglu",), "logit_softcap": ()}, window_every=6, scaled_windows=False, window_theta=True
    ),
    "smollm3": Architecture("smollm3", _QKV_BIAS, pairs=True),
    "gpt_neox": Architecture("gptneox", _BIASES | _UNTIED | {"mlp": ("gelu",)}, plain_heads=True),
    "starcoder2": Architecture("starcoder2", _BIASES | {"mlp": ("gelu",)}, plain_heads=True),
    "granite": Architecture("granite", _BIASES, pairs=True, scales=True),
    "mixtral": Architecture("llama", _MOE, pairs=True),
    "qwen3_moe": Architecture("qwen3moe", _MOE),
    "gpt_oss": Architecture("gpt-oss", _BIASES | _UNTIED | {"mlp": ("clamped_swiglu",)}, window_every=2),
    "glm4_moe": Architecture("glm4moe", _QKV_BIAS),
}
"""`model_type` → architecture. Logits of each were compared with those of llama.cpp (docs/evidence/hugging-face.md)."""
