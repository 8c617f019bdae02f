"""Random models of transformers built offline, run folders to export, and functions that compare the two."""

import os
from dataclasses import asdict

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may use the network

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging

from lit_llm.checkpoint import disk_format
from lit_llm.commands.export import Source, export_folder
from lit_llm.models.generation import Sampling, generate
from lit_llm.models.gpt import GPT, GPTConfig

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCAB, CONTEXT = 101, 64
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    **NO_IDS,
}
GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": VOCAB, "n_positions": CONTEXT, **NO_IDS}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

THEIRS = {
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2, own head, MLP width, eps": lambda: GPT2Config(
        **GPT2, tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1, attn_pdrop=0.0
    ),
    "llama": lambda: LlamaConfig(**SIZE),
    "llama, heads, theta, eps": lambda: LlamaConfig(
        **{**SIZE, "num_attention_heads": 8, "num_key_value_heads": 8},
        rope_parameters={"rope_type": "default", "rope_theta": 37.0},
        rms_norm_eps=0.3,
    ),
    "llama 3.1": lambda: LlamaConfig(**SIZE, rope_parameters=dict(LLAMA3)),
    "llama, tied, one key head, wide heads": lambda: LlamaConfig(
        **{**SIZE, "num_key_value_heads": 1}, tie_word_embeddings=True, head_dim=12
    ),
    "llama, biases, geglu": lambda: LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "mistral": lambda: MistralConfig(**SIZE, sliding_window=5),
    "mistral, no window": lambda: MistralConfig(**SIZE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZE),
    "qwen2, window, tied": lambda: Qwen2Config(
        **SIZE, use_sliding_window=True, sliding_window=6, max_window_layers=0, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**SIZE, head_dim=12, rms_norm_eps=0.2),
    "qwen3, window": lambda: Qwen3Config(
        **SIZE, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=0, tie_word_embeddings=True
    ),
}


LLAMA = {"mlp": "swiglu", "qk_norm": False}
LEARNED = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False}
OURS = {
    "the defaults": ({}, "Qwen3ForCausalLM"),
    "defaults with a window": ({"window": 7, "n_kv_head": 2}, "Qwen3ForCausalLM"),
    "GPT-2": ({**LEARNED, "bias": True, "tie_embeddings": True}, "GPT2LMHeadModel"),
    "GPT-2 without biases": (LEARNED, "GPT2LMHeadModel"),
    "LLaMA": (LLAMA, "LlamaForCausalLM"),
    "LLaMA, ReLU², biases": ({**LLAMA, "mlp": "relu2", "bias": True}, "LlamaForCausalLM"),
    "Mistral": ({**LLAMA, "n_kv_head": 1, "window": 5, "mlp_width": 40}, "MistralForCausalLM"),
    "Qwen2": ({**LLAMA, "mlp": "geglu", "qkv_bias": True, "tie_embeddings": True, "head_dim": 10}, "Qwen2ForCausalLM"),
    "Qwen2 with a window": ({**LLAMA, "qkv_bias": True, "window": 5}, "Qwen2ForCausalLM"),
    "Qwen3 with biases": ({"mlp": "swiglu", "qkv_bias": True, "rope_theta": 99.0, "norm_eps": 0.1}, "Qwen3ForCausalLM"),
    "vocabulary without padding": ({"pad_vocab_to": 1, "tie_embeddings": True}, "Qwen3ForCausalLM"),
    "Llama 3.1": (
        {
            **LLAMA,
            "rope_scaling": {
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16.0,
            },
        },
        "LlamaForCausalLM",
    ),
}


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Set weights so large that every part of the model affects the logits: gains are not 1, biases not 0."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.normal_(std=1.2 * max(min(p.shape), 16) ** -0.5)
        elif name.endswith("bias"):
            p.normal_(std=0.3)
        else:
            around = 0.0 if p.eq(0).all() else 1.0  # a gain of 1 + weight starts at 0
            p.uniform_(around - 0.5, around + 0.5)


def theirs(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[name](), attn_implementation="eager")
    randomise(model)
    return model.to(dtype).eval()


def ours(**changes) -> GPT:
    settings = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": CONTEXT, "vocab_size": VOCAB} | changes
    torch.manual_seed(1)
    model = GPT(GPTConfig(**settings))
    randomise(model)
    for router in model.routers:
        router.reset_buffers()
    return model.eval()


def save(model: GPT, path) -> None:
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    disk_format.write({"state_dict": weights, "model_config": asdict(model.config), "global_step": 3}, path)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(2))


def same_tensors(a: dict, b: dict) -> bool:
    """Same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def export(checkpoint, out, run=None, **options):
    return export_folder(Source(checkpoint, run or out.parent), out, **{"dtype": None, "max_bytes": 1e9} | options)


def load(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) of our model or of theirs."""
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def greedy(model: nn.Module, prompt: list[int], count: int = 40) -> list[int]:
    """The `count` tokens after `prompt`, generated by the library of the model."""
    if isinstance(model, GPT):
        return list(generate(model, prompt, max_new_tokens=count, sampling=Sampling(temperature=0, top_k=None)))
    tokens = torch.tensor([prompt])
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return made[0, len(prompt) :].tolist()
