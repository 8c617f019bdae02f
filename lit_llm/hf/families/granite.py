"""Granite 3: LLaMA with factors of embeddings, attention scores, residual updates and logits."""

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, Biases, Inverse, Setting, attention_scale, embedding_scale
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.llama import FIXED, PARTS
from lit_llm.hf.tensor_map import decoder

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fixed=FIXED,
    parts=(
        *PARTS,
        Setting("embedding_scale", "embedding_multiplier", "number", 1.0, resolved=embedding_scale),
        Setting("attention_scale", "attention_multiplier", "number", 1.0, resolved=attention_scale),
        Setting("residual_scale", "residual_multiplier", "number", 1.0),
        Inverse("logit_scale", "logits_scaling"),
        Biases("attention_bias", ATTENTION_BIASES),
        Biases("mlp_bias", ("mlp",)),
    ),
    tensors=decoder,
)
