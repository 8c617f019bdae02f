"""SmolLM3: LLaMA of which some layers have no rotary embedding."""

from typing import Any

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, Biases
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.layers import FULL, SLIDING, layer_kinds, layer_settings
from lit_llm.hf.families.llama import FIXED, gated
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.fields import Fields, shown
from lit_llm.models.gpt import GPTConfig


class _Layers:
    """Layers without rotary embedding, and the window that they may have."""

    def read(self, fields: Fields) -> dict[str, Any]:
        n_layer, interval = fields.size("num_hidden_layers"), fields.optional_size("no_rope_layer_interval", 4)
        rope = fields.raw("no_rope_layers")
        if rope is None:
            rope = [int((i + 1) % interval != 0) for i in range(n_layer)]
        if not isinstance(rope, list) or len(rope) != n_layer or any(each not in (0, 1) for each in rope):
            fields.refuse(f"'no_rope_layers' is {shown(rope)}, but must be a list of 1 and 0 (no rope), one for each layer")
            rope = [1] * n_layer
        window = fields.optional_size("sliding_window", None)
        used = fields.flag("use_sliding_window", False) and window is not None
        kinds = layer_kinds(fields, lambda _: [FULL if rotated or not used else SLIDING for rotated in rope])
        windows = [window if used and kind == SLIDING else None for kind in kinds]
        return {"layers": {"rope": [bool(each) for each in rope], "window": windows}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        layers = layer_settings(config)
        window = next((layer.window for layer in layers if layer.window is not None), None)
        return {
            "no_rope_layers": [int(layer.rope) for layer in layers],
            "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-6),
        Rope(default_theta=2e6),
        _Layers(),
        Biases("attention_bias", ATTENTION_BIASES),
        Biases("mlp_bias", ("mlp",)),
    ),
    tied=True,
    harmless=("max_window_layers",),
)
