"""Reads and writes LoRA adapters as the package peft stores them: adapter_config.json and adapter_model.safetensors.

peft adapts layers of transformers. Such a layer can contain several of our layers (GPT-2's c_attn, Phi-3's qkv_proj). Export
then makes one adapter of theirs: A stacks the matrices A of our layers, and B is block diagonal. Import gives each of ours
the whole A and the layer's own rows of B. Both conversions are exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_llm.core.disk import read_object, write_json
from lit_llm.core.errors import UserError, library_errors
from lit_llm.hf.fields import shown
from lit_llm.hf.read import refuse_first_five, safetensors
from lit_llm.hf.tensor_map import Link
from lit_llm.models.lora import LoRAConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (True, False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),  # other values change the base weights
}
"""Key of adapter_config.json → the values of it that can be imported."""
_FREE = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "fan_in_fan_out", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "task_type", "auto_mapping", "peft_version", "revision",
    "base_model_name_or_path", "inference_mode", "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config",
}  # fmt: skip
"""Keys of adapter_config.json that may have any value: import reads them, they concern training, or they follow from tensors.
A non-empty value of any other key is refused, because it may change what the adapter computes."""
_MERGE = "merge the adapter with peft (merge_and_unload), save the model, and import that without --init_from"


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def write_adapter(
    adapters: Mapping[str, Tensor],
    lora: LoRAConfig,
    table: list[Link],
    shapes: Mapping[str, torch.Size],
    folder: Path,
    dtype: torch.dtype | None = None,
) -> int:
    """Write an adapter for peft into `folder`; return the number of layers of transformers that it adapts.

    Args:
        adapters: {our name: tensor}: `blocks.….lora_a` (rank, in) and `blocks.….lora_b` (out, rank).
        table: links between our tensors and those of the base model in transformers.
        shapes: our name of a weight → its shape.
        dtype: dtype of the written tensors; None: unchanged.

    Raises:
        UserError: a router or a routed expert has an adapter; or another MLP of a model with experts has an adapter, which
            peft would take for an adapter of experts.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for link in _matrices(table):
        layers = [name.removesuffix("weight") for name in link.ours]
        adapted = [layer for layer in layers if f"{layer}lora_a" in adapters]
        if not adapted:
            continue
        theirs, rank = link.theirs.removesuffix(".weight"), lora.rank * len(adapted)
        columns = []  # for each of our layers its rows of B: (o, rank), zero outside the columns of its own A
        for layer in layers:
            part = torch.zeros(shapes[f"{layer}weight"][0], rank)
            if layer in adapted:
                start = adapted.index(layer) * lora.rank
                part[:, start : start + lora.rank] = adapters[f"{layer}lora_b"]
            columns.append(part)
        both = {
            "A": torch.cat([adapters[f"{layer}lora_a"] for layer in adapted]),
            "B": replace(link, transposed=False).join(columns),
        }
        for name, tensor in both.items():
            tensors[f"{_PREFIX}{theirs}.lora_{name}.weight"] = tensor.to(dtype or tensor.dtype).contiguous()
        ranks[theirs] = rank
    written = {name for link in _matrices(table) for name in link.ours}
    left = [name for name in adapters if name.endswith("lora_a") and f"{name.removesuffix('lora_a')}weight" not in written]
    if left:
        raise UserError(
            f"peft stores adapters of routers and routed experts ({left[0].removesuffix('.lora_a')}) in another way: export "
            "the merged weights (leave out --adapter)"
        )
    taken = [name for name in ranks if name.endswith(("gate_proj", "up_proj", "down_proj"))]
    if taken and any(link.expert is not None for link in table):
        raise UserError(
            f"peft takes adapters called {taken[0].rpartition('.')[2]} for those of routed experts, where a model has some: "
            "export the merged weights (leave out --adapter), or adapt attention only (--lora.targets)"
        )
    patterns = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    every = [link.theirs.removesuffix(".weight") for link in table if link.theirs.endswith(".weight")]
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": any(link.transposed for link in _matrices(table)),
        "target_modules": shortest_endings(ranks, every),
        "rank_pattern": patterns,
        "alpha_pattern": {name: lora.scale * rank for name, rank in patterns.items()},
    }
    write_json(content, folder / CONFIG)
    safetensors().torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return len(ranks)


def read_adapter(folder: Path, table: list[Link], shapes: Mapping[str, torch.Size]) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Return (our LoRA settings, {our name: tensor}) from a folder of peft.

    All our adapters have one rank and one scale. So an adapter of lower rank is padded with zeros, an adapter that only some
    blocks have is zero in the others, and a differing scale is multiplied into B.

    Args:
        table: links between our tensors and those of the base model in transformers.
        shapes: our name of a weight → its shape.

    Raises:
        UserError: the folder has no LoRA adapter that can be imported, or adapts anything but linear layers of blocks.
    """
    content = read_object(folder / CONFIG)
    problems = [
        f"'{key}' is {shown(value)}, which cannot be imported: {_MERGE}"
        for key, value in content.items()
        if (value not in _ALLOWED[key] if key in _ALLOWED else value and key not in _FREE)
    ]
    if "peft_type" not in content:
        problems.append("'peft_type' is missing")
    refuse_first_five(problems, folder / CONFIG)
    theirs = _tensors(folder / WEIGHTS)
    matrices: dict[str, tuple[Tensor, Tensor, float]] = {}  # our layer → A, B, scale
    for link in _matrices(table):
        name = link.theirs.removesuffix(".weight")
        a, b = (theirs.pop(f"{_PREFIX}{name}.lora_{part}.weight", None) for part in "AB")
        if a is None and b is None:
            continue
        parts = [shapes[ours] for ours in link.ours]
        outputs, inputs = sum(part[0] for part in parts), parts[0][1]
        if a is None or b is None or not a.numel() or a.shape[1:] != (inputs,) or b.shape != (outputs, a.shape[0]):
            problems.append(f"{name} needs lora_A (r, {inputs}) and lora_B ({outputs}, r), with r of at least 1")
            continue
        scale = _scale(content, name, a.shape[0], problems)
        pieces = replace(link, transposed=False).split(b, [torch.Size((part[0], a.shape[0])) for part in parts])
        for ours, piece in zip(link.ours, pieces, strict=True):
            layer = ours.removesuffix("weight")
            if layer in matrices and not (torch.equal(matrices[layer][0], a) and torch.equal(matrices[layer][1], piece)):
                problems.append(f"{name} must have the adapter of its gate or up matrix, because 'hidden_act' is relu")
            matrices[layer] = a, piece, scale
    left = [name.removeprefix(_PREFIX) for name in theirs]
    problems += [f"{name} adapts no linear layer in a block of the base model" for name in left]
    if not matrices and not problems:
        problems.append("it has no tensors")
    refuse_first_five(problems, folder / WEIGHTS)
    every = [name.removesuffix("weight") for name in shapes if name.startswith("blocks.") and len(shapes[name]) == 2]
    kinds = {_kind(layer) for layer in matrices}
    rank, scale = max(a.shape[0] for a, *_ in matrices.values()), next(iter(matrices.values()))[2]
    adapters = {}
    for layer, (a, b, own) in matrices.items():
        missing = rank - a.shape[0]
        adapters[f"{layer}lora_a"] = torch.nn.functional.pad(a, (0, 0, 0, missing)).clone()
        adapters[f"{layer}lora_b"] = torch.nn.functional.pad(b if own == scale else b * (own / scale), (0, missing)).clone()
    for layer in every:
        if _kind(layer) in kinds and layer not in matrices:  # peft can adapt some blocks only
            adapters[f"{layer}lora_a"] = torch.zeros(rank, shapes[f"{layer}weight"][1])
            adapters[f"{layer}lora_b"] = torch.zeros(shapes[f"{layer}weight"][0], rank)
    targets = shortest_endings(sorted(kinds), sorted({_kind(layer) for layer in every}))
    dropout = content.get("lora_dropout")
    return LoRAConfig(rank, scale * rank, targets, float(dropout) if isinstance(dropout, int | float) else 0.0), adapters


def shortest_endings(chosen: Iterable[str], every: list[str]) -> list[str]:
    """Return the shortest ending of each name in `chosen` that, of all names in `every`, only chosen ones have, in whole
    components (between dots)."""
    chosen = list(chosen)
    endings: list[str] = []
    for name in chosen:
        parts = name.split(".")
        for ending in (".".join(parts[start:]) for start in reversed(range(len(parts)))):
            if all(each in chosen for each in every if f".{each}".endswith(f".{ending}")):
                endings.append(ending)
                break
    return list(dict.fromkeys(endings))


def _kind(layer: str) -> str:
    """Return our name of a layer without the prefix of the block: `mlp.up` for `blocks.3.mlp.up.`."""
    return layer.removesuffix(".").split(".", 2)[2]


def _matrices(table: list[Link]) -> list[Link]:
    """Return the links in `table` of the weights of linear layers in blocks, except routed experts and routers."""
    others = ("_norm.weight", "router.weight")
    return [
        link
        for link in table
        if link.theirs.endswith(".weight")
        and link.ours[0].startswith("blocks.")
        and not link.ours[0].endswith(others)
        and link.expert is None
    ]


def _scale(content: dict[str, Any], name: str, rank: int, problems: list[str]) -> float:
    """Return the scale of the adapter of the layer `name`: alpha / rank, or alpha / √rank with rsLoRA. Adds to `problems`."""
    wanted = _of_layer(content, "rank_pattern", "r", name, problems)
    if wanted != rank:
        problems.append(f"{name} has rank {rank}, but 'r' and 'rank_pattern' say {shown(wanted)}")
    alpha = _of_layer(content, "alpha_pattern", "lora_alpha", name, problems)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        problems.append(f"'lora_alpha' is {shown(alpha)}, but must be a number above 0")
        return 1.0
    return float(alpha) / (math.sqrt(rank) if content.get("use_rslora") else rank)


def _of_layer(content: dict[str, Any], patterns: str, default: str, name: str, problems: list[str]) -> Any:
    """Return the rank or alpha, a JSON value, of the layer `name` in `content`, an adapter_config.json. Adds to `problems`.

    The key `patterns` maps regular expressions to numbers: the first one that matches the name, or the end of the name after a
    dot, decides. Without a match, the number is the value of the key `default`.
    """
    given = content.get(patterns) or {}
    try:
        matches = [value for key, value in given.items() if re.match(rf"(.*\.)?({key})$", name)]
    except (AttributeError, re.error) as error:
        problems.append(f"'{patterns}' is {shown(given)}, but must map regular expressions to numbers: {error}")
        return None
    return matches[0] if matches else content.get(default, 8)


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(f"{file.parent} has no {WEIGHTS} (--from)")
    library = safetensors()
    with library_errors(f"{file} cannot be read"):
        tensors: dict[str, Tensor] = library.torch.load_file(file)
    if wrong := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise UserError(f"{file}: {wrong[0]} has {str(tensors[wrong[0]].dtype)[6:]}, but must have floating-point numbers")
    return tensors
