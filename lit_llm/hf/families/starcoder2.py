"""StarCoder2: LayerNorm, biases and an MLP of two matrices, with rotary positions."""

from functools import partial

from lit_llm.hf.families.config_parts import PLAIN, Activation, Biases, Heads, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.layers import Window
from lit_llm.hf.families.llama import SIZES
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.tensor_map import decoder

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"norm": "layernorm", "position": "rope", "qk_norm": False, "norm_bias": True},
    parts=(
        *SIZES,
        Heads(),
        Setting("norm_eps", "norm_epsilon", "number", 1e-5),
        Activation("hidden_act", PLAIN, "gelu_pytorch_tanh"),
        Rope(),
        Window(),
        Biases("use_bias", ("qkv", "attention_output", "mlp"), default=True),
    ),
    tensors=partial(decoder, mlp={"c_fc": ("up",), "c_proj": ("project",)}),
    tied=True,
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
    all_dropouts=True,
    only={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
    harmless=("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)
