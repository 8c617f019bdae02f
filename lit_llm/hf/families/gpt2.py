"""GPT-2: learned positions, LayerNorm, matrices stored as (in, out)."""

from collections.abc import Iterator

from lit_llm.hf.families.config_parts import PLAIN, Activation, Heads, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.tensor_map import Link, linear
from lit_llm.models.gpt import GPTConfig


def _tensors(config: GPTConfig) -> Iterator[Link]:
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
    tensors=_tensors,
    tied=True,
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    all_dropouts=True,
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    harmless=(
        *("n_ctx", "reorder_and_upcast_attn", "predict_special_tokens", "gradient_checkpointing"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
)
