"""Writes a model as one file of llama.cpp's format GGUF, with the package `gguf`: settings, tokenizer, tensors.

`gguf` translates the names of transformers' tensors. Two kinds of tensors have other values than in transformers: the rows of
query and key weights are reordered if llama.cpp rotates neighbouring dimensions, and 1 is added to the gains of Gemma's norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_llm.core.errors import UserError, need, refuse
from lit_llm.hf.gguf_architectures import ARCHITECTURES, Architecture
from lit_llm.hf.tensor_map import Link
from lit_llm.hf.write import joined
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.rotary import scale_frequencies

QUANTISED = "q8_0"
"""GGUF's quantised type: values of 8 bits, with a scale for each block of 32 values."""
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", QUANTISED: "Q8_0"}
_ALWAYS_F32 = ("ffn_gate_inp.weight", "position_embd.weight", ".bias")
"""Endings of the names of tensors with several dimensions that llama.cpp needs in fp32. Vectors are always fp32."""


def package() -> Any:
    return need("gguf", what="--format gguf")


def architecture_of(config: GPTConfig, family: str) -> Architecture:
    """Return the architecture of llama.cpp that computes the same as a model.

    Args:
        family: the model's `model_type` in transformers.

    Raises:
        UserError: no architecture computes the same; one sentence for each setting that GGUF cannot express.
    """
    if family not in ARCHITECTURES:
        raise UserError(f"GGUF is written of {', '.join(ARCHITECTURES)} only, but the model is of {family} (--format)")
    refuse(list(dict.fromkeys(ARCHITECTURES[family].problems(config))))
    return ARCHITECTURES[family]


def write_gguf(
    file: Path,
    state: dict[str, Tensor],
    table: list[Link],
    config: GPTConfig,
    architecture: Architecture,
    vocabulary: dict[str, Any],
    dtype: str,
) -> list[str]:
    """Write the GGUF file of a model. One tensor at a time is converted.

    Args:
        state: our state_dict.
        table: links between our tensors and transformers' tensors.
        vocabulary: {GGUF key: value} for the tokenizer.
        dtype: type of matrices, a key of `_TYPES`. Vectors, biases, routers and learned positions are float32.

    Returns:
        Notes for the user, one sentence each.
    """
    gguf = package()
    writer = gguf.GGUFWriter(file, architecture.name)
    kind = gguf.GGMLQuantizationType[_TYPES[dtype]]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{_TYPES[dtype]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in {**_settings(config, architecture), **vocabulary}.items():
        writer.add_key_value(key, value, _kind(gguf, value))
    in_f16, types = 0, {}
    shapes = {name: tensor.to("meta") for name, tensor in state.items()}
    for name, tensor in _tensors(gguf, shapes, table, config, architecture):
        types[name] = kind
        if tensor.ndim == 1 or name.endswith(_ALWAYS_F32):
            types[name] = gguf.GGMLQuantizationType.F32
        elif dtype == QUANTISED and tensor.shape[-1] % 32:
            types[name] = gguf.GGMLQuantizationType.F16
            in_f16 += 1
        block, size = gguf.GGML_QUANT_SIZES[types[name]]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(gguf, state, table, config, architecture):
        writer.write_tensor_data(gguf.quantize(tensor.float().contiguous().numpy(), types[name]))
    writer.close()
    return [f"{in_f16} matrices whose rows are no multiple of 32 values are float16, not {QUANTISED}"] if in_f16 else []


def _kind(gguf: Any, value: Any) -> Any:
    """Return GGUF's value type (`GGUFValueType`) for the Python value of a key, UINT32 for an int. `gguf`: the package."""
    kinds = gguf.GGUFValueType
    return {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}[type(value)]


def _settings(config: GPTConfig, architecture: Architecture) -> dict[str, Any]:
    """Return {GGUF key: value} for the settings of a model."""
    layers = [config.layer(i) for i in range(config.n_layer)]
    full = next((layer for layer in layers if layer.window is None), layers[0])
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.hidden_width,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.resolved_head_dim,
        "attention.value_length": config.resolved_head_dim,
        f"attention.layer_norm{'_rms' * (config.norm == 'rmsnorm')}_epsilon": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
    }
    if config.position == "rope":
        keys |= {"rope.dimension_count": config.rotated_dims, "rope.freq_base": float(full.rope_theta)}
    scaling: dict[str, Any] = dict(full.rope_scaling or {})
    kind = scaling.get("rope_type", "llama3" if scaling else "none")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
        keys["rope.scaling.yarn_beta_fast"] = float(scaling.get("beta_fast", 32.0))
        keys["rope.scaling.yarn_beta_slow"] = float(scaling.get("beta_slow", 1.0))
    windowed = next((layer for layer in layers if layer.window is not None), None)
    if windowed is not None:
        keys["attention.sliding_window"] = windowed.window
        keys["attention.sliding_window_pattern"] = [layer.window is not None for layer in layers]
        keys["rope.freq_base_swa"] = float(windowed.rope_theta)
    if config.attention_softcap is not None:
        keys["attn_logit_softcapping"] = float(config.attention_softcap)
    if config.logit_softcap is not None:
        keys["final_logit_softcapping"] = float(config.logit_softcap)
    if architecture.scales:
        keys["attention.scale"] = float(config.attention_scale or config.resolved_head_dim**-0.5)
        keys["embedding_scale"] = float(config.embedding_scale or 1.0)
        keys["residual_scale"] = float(config.residual_scale)
        keys["logit_scale"] = 1 / config.logit_scale
    if (moe := config.moe) is not None:
        keys["expert_count"], keys["expert_used_count"] = moe.experts, moe.top_k
        keys["expert_feed_forward_length"] = moe.width(config.hidden_width)
        keys["expert_weights_norm"], keys["expert_weights_scale"] = moe.normalise, float(moe.scale)
        keys["expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[moe.router]
        keys["expert_shared_count"] = moe.shared_experts
        keys["leading_dense_block_count"] = sum(not layer.experts for layer in layers)
        keys["expert_group_count"], keys["expert_group_used_count"] = moe.effective_groups
    return {f"{architecture.name}.{key}": value for key, value in keys.items()}


def _tensors(
    gguf: Any, state: dict[str, Tensor], table: list[Link], config: GPTConfig, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in GGUF, tensor) for each tensor of the file. `state`: {our name: tensor}."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.n_layer)
    assert config.vocab_size is not None
    if config.rope_scaling is not None and config.rope_scaling.get("rope_type", "llama3") == "llama3":
        half = config.rotated_dims // 2
        plain = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)  # (r/2,)
        scaled, _ = scale_frequencies(plain, config.rope_theta, config.rope_scaling, positions=config.block_size, long=False)
        yield "rope_freqs.weight", plain / scaled
    for link in table:
        if link.expert:
            continue  # the link of expert 0 gives the tensor of all experts
        if link.of_experts:
            for part in link.ours:
                stem, _, end = part.removeprefix("blocks.").partition(".mlp.")
                end = end.replace("project", "down").replace(".", "_proj.")
                yield names.get_name(f"model.layers.{stem}.mlp.experts.{end}", try_suffixes=(".weight", ".bias")), state[part]
            continue
        theirs = link.theirs.replace(".experts.0.", ".experts.").replace("e_score_correction_bias", "e_score_correction.bias")
        theirs += ".weight" if theirs.endswith(".sinks") else ""
        whole = replace(link, transposed=False, order=None, expert=None)
        tensor = joined(state, whole, config.vocab_size)
        if architecture.pairs and link.ours[0].rpartition(".")[0].endswith(("attention.query", "attention.key")):
            # Row i of a head's first half and row i of its second half become neighbours.
            tensor = tensor.unflatten(0, (-1, 2, config.resolved_head_dim // 2)).transpose(1, 2).flatten(0, 2)
        if config.norm_unit_offset and "norm" in link.ours[0]:
            tensor = 1 + tensor.float()
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"{architecture.name} of GGUF has no tensor for {link.theirs}")
        yield name, tensor
