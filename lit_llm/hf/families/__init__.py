"""The model families of transformers that can be imported and exported: their settings and the names of their tensors.

A family is a constant of type `Family`, in capitals; imports in this file show where it is defined. To add a family, write such
a constant, from the parts in `config_parts`, and add it to the table `FAMILIES`.
"""

from lit_llm.hf.families.deepseek import DEEPSEEK_V3
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.gemma import GEMMA2, GEMMA3
from lit_llm.hf.families.gpt import GPT2, GPT_NEOX
from lit_llm.hf.families.llama import (
    GRANITE,
    LLAMA,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from lit_llm.hf.families.mixture import GLM4_MOE, GPT_OSS, MIXTRAL, OLMOE, QWEN3_MOE

_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, OLMO2, OLMO3, GEMMA2, GEMMA3, SMOLLM3, PHI3, GPT_NEOX, STARCODER2, GRANITE)
_ALL = (*_DENSE, MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS, GLM4_MOE, DEEPSEEK_V3)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""`model_type` → family. Export takes the first family that computes the same as a model."""
