"""OLMo 2 and 3: norms after attention and MLP, and one norm over all queries or keys of a position."""

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, GATED, Activation, Biases, Heads, Setting
from lit_llm.hf.families.family import Family, Part
from lit_llm.hf.families.layers import WindowByKind, every
from lit_llm.hf.families.llama import FIXED, SIZES
from lit_llm.hf.families.rope import Rope, RopeByKind
from lit_llm.hf.tensor_map import decoder

_PARTS: tuple[Part, ...] = (
    *SIZES,
    Heads(),
    Setting("norm_eps", "rms_norm_eps", "number", 1e-5),
    Activation("hidden_act", GATED, "silu"),
    Biases("attention_bias", ATTENTION_BIASES),
)
_FIXED = FIXED | {"norm_position": "post", "qk_norm": True, "qk_norm_width": "projection"}

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed=_FIXED,
    parts=(*_PARTS, Rope()),
    tensors=decoder,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fixed=_FIXED,
    parts=(*_PARTS, WindowByKind(every(4)), RopeByKind(every(4), 5e5, 5e5, sliding_theta="rope_theta")),
    tensors=decoder,
)
