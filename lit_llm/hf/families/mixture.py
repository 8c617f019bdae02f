"""Families with a mixture of experts in the place of the MLP: MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS, GLM4_MOE.

All but GPT-OSS store each expert's matrix as a tensor; lit_llm has one tensor for the matrices of all experts. The keys
`output_router_logits` and `router_aux_loss_coef` are ignored: they set training losses; lit_llm has others (docs/moe.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, EXPERTS, Biases, Heads, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.layers import Window, WindowByKind, every, layer_settings
from lit_llm.hf.families.llama import FIXED, SIZES, gated
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.fields import Fields, shown
from lit_llm.hf.tensor_map import ExpertNames, decoder
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.mlp import CLAMP, SIGMOID_GAIN


@dataclass(frozen=True)
class Mixture:
    """`Part` of a family for the settings of experts, `model.moe`: their number, experts per token, and those in `keys`."""

    experts: tuple[str, ...]
    """Keys for the number of experts, of which a config.json has one. Export writes the first, as published files have."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Setting of MoEConfig → the value that all models of the family share."""
    keys: tuple[Setting, ...] = ()
    """Settings of MoEConfig that have a key in config.json."""
    dense_blocks: bool = False
    """Whether keys `decoder_sparse_step` and `mlp_only_layers` choose blocks without experts. If False, no key does."""

    def read(self, fields: Fields) -> dict[str, Any]:
        named = [name for name in self.experts if fields.has(name)]
        moe: dict[str, Any] = {
            **self.fixed,
            "experts": fields.size(named[0] if named else self.experts[0]),
            "top_k": fields.size("num_experts_per_tok"),
        }
        for key in self.keys:
            moe |= key.read(fields)
        if not self.dense_blocks or all(blocks := _blocks(fields)):
            return {"moe": moe}
        return {"moe": moe, "layers": {"experts": blocks}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        moe = config.moe
        if moe is None:
            return {}
        dense = [i for i, layer in enumerate(layer_settings(config)) if not layer.experts]
        width = moe.width(config.hidden_width)
        groups, top_groups = moe.effective_groups
        if groups == moe.experts:  # groups of one expert: transformers adds the two best scores of each group
            groups = top_groups = 1
        values = {**vars(moe), "expert_width": width, "groups": groups, "top_groups": top_groups}
        values["first_dense"] = len(dense)  # if other blocks are dense, export notices it on reading
        content: dict[str, Any] = {self.experts[0]: moe.experts, "num_experts_per_tok": moe.top_k}
        if not any(key.ours == "expert_width" for key in self.keys):
            content["intermediate_size"] = width
        content |= {key.theirs: values[key.ours] for key in self.keys}
        if self.dense_blocks:
            content |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return content


def _blocks(fields: Fields) -> list[bool]:
    """Return for each block whether it has experts: each `decoder_sparse_step`-th has, unless `mlp_only_layers` lists it."""
    n_layer, step = fields.size("num_hidden_layers"), fields.optional_size("decoder_sparse_step", 1)
    listed: Any = fields.raw("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        fields.refuse(f"'mlp_only_layers' is {shown(listed)}, but lit_llm supports only a list of numbers of layers")
        listed = []
    dense = set(listed)
    blocks = [(i + 1) % step == 0 and i not in dense for i in range(n_layer)]
    if not any(blocks):
        fields.refuse(f"'mlp_only_layers' and 'decoder_sparse_step' leave no layer with experts of {n_layer}")
    return blocks


_EXPERT_WIDTH = Setting("expert_width", "moe_intermediate_size")
_NORMALISE = Setting("normalise", "norm_topk_prob", "flag", False)
CHOICE_BIAS = partial(decoder, experts=ExpertNames(choice_bias="e_score_correction_bias"))
"""`Family.tensors` of families whose routers add a bias to choose experts."""


def sigmoid_mixture(*, first_dense: int, scale: float, groups: int, top_groups: int) -> Mixture:
    """Return the `Part` for experts of DeepSeek-V3 and GLM. Arguments: the values that transformers takes for missing keys."""
    return Mixture(
        ("n_routed_experts", "num_local_experts"),
        fixed={"router": "sigmoid"},
        keys=(
            _EXPERT_WIDTH,
            Setting("shared_experts", "n_shared_experts", "number", 1),
            Setting("first_dense", "first_k_dense_replace", "number", first_dense),
            Setting("normalise", "norm_topk_prob", "flag", True),
            Setting("scale", "routed_scaling_factor", "number", scale),
            Setting("groups", "n_group", "number", groups),
            Setting("top_groups", "topk_group", "number", top_groups),
        ),
    )


_TRAINING = ("output_router_logits", "router_aux_loss_coef")
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-5, activations=EXPERTS),
        Rope(default_theta=1e6),
        Window(),
        Mixture(("num_local_experts", "num_experts")),
    ),
    tensors=partial(decoder, experts=ExpertNames("block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "project"})),
    only={"router_jitter_noise": (0.0,)},
    harmless=_TRAINING,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fixed=FIXED | {"qk_norm": True},
    parts=(
        *gated(1e-6, activations=EXPERTS),
        Rope(),
        Biases("attention_bias", ATTENTION_BIASES),
        Mixture(("num_experts", "num_local_experts"), keys=(_EXPERT_WIDTH, _NORMALISE), dense_blocks=True),
    ),
    only={
        **{"use_sliding_window": (False,), "qkv_bias": (False,)},
        **{"use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},  # of Qwen3-Coder; transformers does not read them
    },
    harmless=(*_TRAINING, "sliding_window", "max_window_layers"),
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fixed=FIXED | {"qk_norm": True, "qk_norm_width": "projection"},
    parts=(
        *gated(1e-5, Heads(head_dim=None), EXPERTS),
        Rope(),
        Biases("attention_bias", ATTENTION_BIASES),
        Mixture(("num_experts", "num_local_experts"), keys=(_NORMALISE,)),
    ),
    only={"clip_qkv": (None,)},
    harmless=_TRAINING,
)
# GPT-OSS: alternating windows, sinks, biases everywhere. Published weights are MXFP4, which transformers writes as bf16.
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fixed=FIXED | {"mlp": "clamped_swiglu", "mlp_bias": True, "attention_sinks": True},
    parts=(
        *SIZES,
        Heads(default_head_dim=64),
        Setting("norm_eps", "rms_norm_eps", "number", 1e-5),
        Rope(default_theta=150_000.0, default=_YARN),
        WindowByKind(every(2), 128),
        Biases("attention_bias", ATTENTION_BIASES, True),
        Mixture(("num_local_experts", "num_experts"), fixed={"router_bias": True}),
    ),
    tensors=partial(decoder, experts=ExpertNames(in_one=True)),
    experts_in_one=True,
    only={"hidden_act": ("silu",), "swiglu_alpha": (SIGMOID_GAIN,), "swiglu_limit": (CLAMP,)},
    harmless=(*_TRAINING, "initial_context_length", "experts_per_token"),
)
# GLM-4.5 and 4.6: sigmoid scores, a bias for the choice of experts only, a shared expert, the first layers dense.
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-5, activations=EXPERTS),
        Rope(partial="partial_rotary_factor", default_partial=0.5),
        Biases("attention_bias", ("qkv",)),
        Setting("qk_norm", "use_qk_norm", "flag", False),
        sigmoid_mixture(first_dense=1, scale=1.0, groups=1, top_groups=1),
    ),
    tensors=CHOICE_BIAS,
    ahead="num_nextn_predict_layers",
    harmless=_TRAINING,
)
