"""Model families of Hugging Face folders: settings and tensors for both directions.

A family is a constant in capitals: the imports below show in which file it is. To add a family, write a `Family` like these and
put it into the table. `config_parts` has ready-made parts.
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
"""`model_type` → family. Export takes the first family that is equivalent to a model."""
