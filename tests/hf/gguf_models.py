"""One model for each family with a form in GGUF, with the settings that it has there."""

import transformers as hf
from family_models import GRANITE, LINEAR, LLAMA3, NO_HEAD_DIM, SIZE, WIDTH, WINDOW, YARN
from family_models import MODELS as ALL

FULL_AND_SLIDING = {"full_attention": dict(LINEAR), "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
YARN_AND_SLIDING = {"full_attention": dict(YARN), "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
FIVE = {"num_hidden_layers": 5}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}
MODELS = {
    "gpt2": ALL["gpt2"],
    "llama": lambda: hf.LlamaConfig(**SIZE, mlp_bias=True, attention_bias=True, rope_parameters=dict(LLAMA3)),
    "mistral": lambda: hf.MistralConfig(**SIZE, sliding_window=None, rope_parameters=dict(YARN)),
    "qwen2": lambda: hf.Qwen2Config(**NO_HEAD_DIM),
    "qwen3": lambda: hf.Qwen3Config(**SIZE, tie_word_embeddings=True),
    "olmo2": lambda: hf.Olmo2Config(**NO_HEAD_DIM),
    "olmo3": lambda: hf.Olmo3Config(**NO_HEAD_DIM | FIVE, sliding_window=WINDOW, rope_parameters=YARN_AND_SLIDING),
    "gemma2": lambda: hf.Gemma2Config(**SIZE, sliding_window=WINDOW, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **SIZE | {"num_hidden_layers": 7}, sliding_window=WINDOW, query_pre_attn_scalar=24, rope_parameters=FULL_AND_SLIDING
    ),
    "smollm3": lambda: hf.SmolLM3Config(**SIZE | FIVE),
    "gpt_neox": lambda: hf.GPTNeoXConfig(
        **{key: value for key, value in NO_HEAD_DIM.items() if key != "num_key_value_heads"}, hidden_act="gelu_new"
    ),
    "starcoder2": lambda: hf.Starcoder2Config(**NO_HEAD_DIM, sliding_window=None),
    "granite": lambda: hf.GraniteConfig(**SIZE, **GRANITE, attention_bias=True),
    "mixtral": lambda: hf.MixtralConfig(**SIZE, **EXPERTS, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZE, **WIDTH, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZE | {"num_hidden_layers": 4}, **EXPERTS, sliding_window=WINDOW, rope_parameters={**YARN, "truncate": True}
    ),
    "glm4_moe": ALL["glm4_moe"],
}
"""`model_type` → configuration."""
