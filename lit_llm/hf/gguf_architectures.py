"""Which models GGUF has a form for: the architectures of llama.cpp, by the family that an export would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import shown
from lit_llm.hf.equivalence import computation
from lit_llm.hf.families.family import BIASES
from lit_llm.models.gpt import GPTConfig

_EACH = (False, True)
_ANY = ()
_ALL = ()
_ONLY: dict[str, tuple[Any, ...]] = {
    "mlp": ("swiglu",),
    "gelu_approximate": (None, "tanh"),
    "attention_softcap": (None,),
    "logit_softcap": (None,),
    **{f"{part}_bias": (False,) for part in BIASES if part != "norm"},
}
"""Setting → the values that an architecture computes, unless it says otherwise."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: what it computes of what the family can be set to."""

    name: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Over `_ONLY`."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """The rope_types other than none."""
    window_every: int | None = None
    """Each such block has no window. None: no block has one."""
    pairs: bool = False
    """Rotates neighbouring dimensions, so that rows of queries and keys are stored in another order."""
    free_head_dim: bool = True
    """Whether head_dim can differ from n_embd / n_head."""
    free_scale: bool = False
    """Whether it has a key for the factor of attention scores."""

    def problems(self, config: GPTConfig) -> Iterator[str]:
        """Settings that have no form here, one sentence each."""
        ours = computation(config)
        for name, values in {**_ONLY, **self.only}.items():
            if values and ours[name] not in values:
                wanted = " or ".join("null" if value is None else str(value).lower() for value in values)
                yield f"model.{name} {shown(ours[name])} has no form in GGUF's {self.name}, which has {wanted} (--model.{name})"
        head_dim, plain = config.resolved_head_dim, config.n_embd // config.n_head
        if not self.free_head_dim and head_dim != plain:
            yield f"model.head_dim {head_dim} has no form in GGUF's {self.name}, which has {plain} (--model.head_dim null)"
        if not self.free_scale and ours["attention_scale"] != head_dim**-0.5:
            scale = f"model.attention_scale {config.attention_scale:g}"
            yield f"{scale} has no form in GGUF's {self.name} (--model.attention_scale null)"
        windows = [window is not None for window in ours["window"]]
        known = [self.window_every is not None and (i + 1) % self.window_every != 0 for i in range(config.n_layer)]
        if any(windows) and windows != known:
            where = "none" if self.window_every is None else f"windows in all blocks but each {self.window_every}th"
            yield f"model.window has no form in GGUF's {self.name}, which has {where} (--model.window, --model.layers)"
        for scaling in ours["rope_scaling"]:
            kind = None if scaling is None else scaling["rope_type"]
            if kind is not None and kind not in self.scalings:
                yield f"model.rope_scaling {kind} has no form in GGUF's {self.name} (--model.rope_scaling null)"
            elif kind == "yarn" and not scaling["truncate"]:
                yield "model.rope_scaling.truncate false has no form in GGUF: llama.cpp rounds YaRN's limits"
            elif scaling is not None and "attention_factor" in scaling:
                yield "model.rope_scaling.attention_factor is not written to GGUF (--model.rope_scaling)"


_BIASES = {f"{part}_bias": _EACH for part in BIASES if part != "norm"}
_QKV_BIAS = {"qkv_bias": _EACH}
_MOE = {"experts": _ALL, "moe.normalise": (True,), "moe.scale": (1.0,), "moe.shared_width": (0,)}
_UNTIED = {"tie_embeddings": (False,)}
ARCHITECTURES = {
    "llama": Architecture("llama", _BIASES, ("linear", "yarn", "llama3"), pairs=True),
    "mistral": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2", _QKV_BIAS, free_head_dim=False),
    "qwen3": Architecture("qwen3", _QKV_BIAS),
    "gpt2": Architecture("gpt2", _BIASES | {"mlp": ("gelu",)}, free_head_dim=False),
    "olmo2": Architecture("olmo2", _UNTIED, free_head_dim=False),
    "olmo3": Architecture("olmo2", _UNTIED, window_every=4, free_head_dim=False),
    "gemma2": Architecture(
        "gemma2", {"mlp": ("geglu",), "logit_softcap": _ANY, "attention_softcap": _ANY, "tie_embeddings": (True,)}, window_every=2
    ),
    "gemma3_text": Architecture("gemma3", {"mlp": ("geglu",), "logit_softcap": _ANY}, window_every=6),
    "smollm3": Architecture("smollm3", _QKV_BIAS, pairs=True),
    "gpt_neox": Architecture("gptneox", _BIASES | _UNTIED | {"mlp": ("gelu",)}, free_head_dim=False),
    "starcoder2": Architecture("starcoder2", _BIASES | {"mlp": ("gelu",)}, free_head_dim=False),
    "granite": Architecture("granite", _BIASES, pairs=True, free_scale=True),
    "mixtral": Architecture("llama", _MOE, pairs=True),
    "qwen3_moe": Architecture("qwen3moe", _MOE | _QKV_BIAS),
    "olmoe": Architecture("olmoe", _MOE | _UNTIED | {"moe.normalise": (False,)}, free_head_dim=False),
    "gpt_oss": Architecture("gpt-oss", _BIASES | _UNTIED | {"mlp": ("clamped_swiglu",), "experts": _ANY}, window_every=2),
    "glm4_moe": Architecture("glm4moe", _QKV_BIAS | {"experts": _ANY}),
}
"""`model_type` → architecture. Each was compared with llama.cpp's own logits (tests/hf/test_gguf.py)."""
