"""The families GPT2 (learned positions, matrices of shape (in, out)) and GPT_NEOX (parallel residual, partly rotated heads)."""

from collections.abc import Iterator

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, PLAIN, Activation, Biases, Heads, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.llama import SIZES
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.tensor_map import Link, linear, rows_by_head
from lit_llm.models.gpt import GPTConfig


def _gpt2(config: GPTConfig) -> Iterator[Link]:
    yield Link("transformer.wte.weight", ("embedding.weight",))
    yield Link("transformer.wpe.weight", ("positions.weight",))
    for i in range(config.n_layer):
        a, b = f"transformer.h.{i}", f"blocks.{i}"
        yield from linear(f"{a}.ln_1", f"{b}.attention_norm", bias=True)
        qkv = [f"{b}.attention.{name}" for name in ("query", "key", "value")]
        yield from linear(f"{a}.attn.c_attn", *qkv, bias=True, transposed=True)
        yield from linear(f"{a}.attn.c_proj", f"{b}.attention.project", bias=True, transposed=True)
        yield from linear(f"{a}.ln_2", f"{b}.mlp_norm", bias=True)
        yield from linear(f"{a}.mlp.c_fc", f"{b}.mlp.up", bias=True, transposed=True)
        yield from linear(f"{a}.mlp.c_proj", f"{b}.mlp.project", bias=True, transposed=True)
    yield from linear("transformer.ln_f", "norm", bias=True)


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={"norm": "layernorm", "position": "learned", "bias": True, "qk_norm": False},
    parts=(
        Setting("n_layer", "n_layer"),
        Heads("n_head", key_value=None, head_dim=None, width="n_embd"),
        Setting("block_size", "n_positions"),
        Setting("mlp_width", "n_inner", "size"),
        Setting("norm_eps", "layer_norm_epsilon", "number", 1e-5),
        Activation("activation_function", PLAIN, "gelu_new"),
    ),
    tensors=_gpt2,
    tied=True,
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    all_dropouts=True,
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    harmless=(
        *("n_ctx", "reorder_and_upcast_attn", "predict_special_tokens", "gradient_checkpointing"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
)


def _neox(config: GPTConfig) -> Iterator[Link]:
    yield Link("gpt_neox.embed_in.weight", ("embedding.weight",))
    for i in range(config.n_layer):
        a, b = f"gpt_neox.layers.{i}", f"blocks.{i}"
        yield from linear(f"{a}.input_layernorm", f"{b}.attention_norm", bias=True)
        width = config.resolved_head_dim
        order = rows_by_head(config.n_head, *(range(first, first + width) for first in (0, width, 2 * width)))
        qkv = [f"{b}.attention.{name}" for name in ("query", "key", "value")]
        yield from linear(f"{a}.attention.query_key_value", *qkv, bias=config.has_bias("qkv"), order=order)
        yield from linear(f"{a}.attention.dense", f"{b}.attention.project", bias=config.has_bias("attention_output"))
        yield from linear(f"{a}.post_attention_layernorm", f"{b}.mlp_norm", bias=True)
        yield from linear(f"{a}.mlp.dense_h_to_4h", f"{b}.mlp.up", bias=True)
        yield from linear(f"{a}.mlp.dense_4h_to_h", f"{b}.mlp.project", bias=True)
    yield from linear("gpt_neox.final_layer_norm", "norm", bias=True)


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fixed={"norm": "layernorm", "position": "rope", "qk_norm": False, "bias": True},
    parts=(
        *SIZES,
        Heads(key_value=None, head_dim=None),
        Setting("norm_eps", "layer_norm_eps", "number", 1e-5),
        Activation("hidden_act", PLAIN, "gelu"),
        Rope(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25),
        Setting("parallel_residual", "use_parallel_residual", "flag", True),
        Biases("attention_bias", ATTENTION_BIASES, default=True),
    ),
    tensors=_neox,
    head="embed_out.weight",
    dropouts=("hidden_dropout", "attention_dropout"),
    all_dropouts=True,
    harmless=("is_decoder",),
    only={name: (0.0,) for name in ("attention_probs_dropout_prob", "hidden_dropout_prob")},
)
