"""Mistral: LLaMA with a window, without biases."""

from lit_llm.hf.families.family import Family
from lit_llm.hf.families.layers import Window
from lit_llm.hf.families.llama import FIXED, PARTS
from lit_llm.hf.tensor_map import decoder

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=FIXED,
    parts=(*PARTS, Window(default=4096)),
    tensors=decoder,
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
