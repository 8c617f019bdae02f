"""Reads the weights in a folder of torch.distributed.checkpoint (DCP), by Hugging Face's names or by ours."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_llm.checkpoint.dcp_folder import DcpFolder
from lit_llm.checkpoint.load_weights import mismatch
from lit_llm.core.errors import UserError
from lit_llm.models.gpt import GPTConfig, weights_on_meta

# Prefixes of names: the key under which a program saves weights, and the attribute of its module that has the model, if any.
_PREFIXES = [f"{key}{attribute}" for key in ("", "model.", "state_dict.") for attribute in ("", "model.")]

_TORCHTITAN = {  # name in torchtitan's Llama, which is Meta's → name in Hugging Face's
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


class DcpWeightFiles:
    """Reader of the weights in a DCP folder: `weights[name]`, with a Hugging Face name, reads and returns a tensor.

    Args:
        expected: names of the tensors that the model has in a Hugging Face folder.
        config: the model's settings, for its numbers of heads.

    Raises:
        UserError: the folder has neither the names `expected` nor the names of torchtitan's Llama, or has the latter and other
            tensors in layers.
    """

    def __init__(self, source: DcpFolder, expected: Collection[str], config: GPTConfig) -> None:
        self.folder, self._source = source.folder, source
        self._heads = {"q_proj": config.n_head, "k_proj": config.n_kv_head or config.n_head}
        self.torchtitan = False
        self._stored: dict[str, str] = {}
        """Name of a tensor in a Hugging Face folder → its name in the DCP folder."""
        for prefix in _PREFIXES:
            own = {name.removeprefix(prefix): name for name in source.files if name.startswith(prefix)}
            titan = {theirs: stored for name, stored in own.items() if (theirs := _from_torchtitan(name)) is not None}
            for names in (own, titan):
                if names.keys() >= set(expected):
                    self._stored, self.torchtitan = names, names is titan
        if not self._stored:
            raise UserError(
                f"{source.folder} has neither Hugging Face's names of this model, such as {min(expected)}, nor those of "
                f"torchtitan's Llama: its tensors are {', '.join(sorted(source.files)[:3])}, … (--config_from)"
            )
        if self.torchtitan:
            stored = set(self._stored.values())
            others = [name for name in source.files if re.search(r"(^|^model\.)layers\.", name) and name not in stored]
            if others:
                raise UserError(f"{source.folder} has tensors that torchtitan's Llama has not: {', '.join(sorted(others)[:3])}")
        first = {name.split(".")[0] for name in expected} | {"lm_head"}  # other names are optimizer state
        self.files: dict[str, Path] = {name: source.folder for name in self._stored if name.split(".")[0] in first}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[self._stored[name]]
        heads = self._heads.get(name.split(".")[-2])
        if not self.torchtitan or heads is None:
            return tensor
        # Rotary embedding rotates pairs of rows: neighbours in Meta's order, rows half a head apart in Hugging Face's order.
        pairs = tensor.unflatten(0, (heads, -1, 2))  # (heads, half of a head, 2, …)
        return pairs.transpose(1, 2).flatten(0, 2)


def _from_torchtitan(name: str) -> str | None:
    layer = re.search(r"\.(\d+)\.", name)
    module, _, kind = name.rpartition(".")
    pattern = re.sub(r"\.\d+\.", ".{}.", module, count=1)
    if pattern not in _TORCHTITAN or kind not in ("weight", "bias"):
        return None
    return f"{_TORCHTITAN[pattern].format(layer[1] if layer else '')}.{kind}"


def own_weights(source: DcpFolder, config: GPTConfig) -> dict[str, Tensor]:
    """Return {our name: tensor} from the DCP folder of a lit_llm model, saved by a Lightning strategy or `export --format dcp`.

    Raises:
        UserError: the folder does not have the weights of a model with the settings `config`.
    """
    own: dict[str, Any] = weights_on_meta(config)
    prefix = next((each for each in _PREFIXES if all(f"{each}{name}" in source.files for name in own)), None)
    if prefix is None:
        raise UserError(
            f"{source.folder} does not hold the weights of its model_config: its tensors are "
            f"{', '.join(sorted(source.files)[:3])}, … (--from)"
        )
    weights = {name: source[f"{prefix}{name}"] for name in own}
    if problem := mismatch(own, weights, f"{source.folder} (--from)"):
        raise UserError(problem)
    return weights
