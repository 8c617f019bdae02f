"""Writes the weights of a model as safetensors files, under the names that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lit_llm.core.disk import write_json
from lit_llm.hf.read import safetensors
from lit_llm.hf.tensor_map import CHOICE_BIAS, VOCABULARY, Link


def write_weights(
    state: dict[str, Tensor],
    table: list[Link],
    folder: Path,
    *,
    vocab_size: int,
    dtype: torch.dtype | None,
    max_bytes: float,
) -> None:
    """Write our state_dict as safetensors into `folder`, under the names of transformers.

    The file is `model.safetensors`. If it would exceed `max_bytes` bytes, several files and an index are written instead. Only
    the tensors of one file are in memory at a time.

    Args:
        table: links between our tensors and transformers' tensors.
        vocab_size: number of rows of embedding and head to write. Further rows are padding.
        dtype: dtype of the written tensors. None: unchanged.
    """
    files: list[list[Link]] = [[]]
    total = filled = 0
    for link in table:
        parts = _parts(state, link, vocab_size)
        size = sum(part.numel() * _dtype(link, part, dtype).itemsize for part in parts)
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(link)
        filled += size
        total += size
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        weight_map = {link.theirs: name for name, links in zip(names, files, strict=True) for link in links}
        write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / "model.safetensors.index.json")
    for name, links in zip(names, files, strict=True):
        tensors = {}
        for link in links:
            whole = joined(state, link, vocab_size)
            tensors[link.theirs] = whole.to(_dtype(link, whole, dtype)).contiguous()
        safetensors().torch.save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read


def _part(state: dict[str, Tensor], name: str, vocab_size: int) -> Tensor:
    if name not in state and name.endswith(".bias"):
        weight = state[name.removesuffix("bias") + "weight"]
        return weight.new_zeros(weight.shape[:-1] or weight.shape)  # a norm's weight has one dimension
    return state[name][:vocab_size] if name in VOCABULARY else state[name]


def _parts(state: dict[str, Tensor], link: Link, vocab_size: int) -> list[Tensor]:
    parts = [_part(state, name, vocab_size) for name in link.ours]
    return parts if link.expert is None else [part[link.expert] for part in parts]


def joined(state: dict[str, Tensor], link: Link, vocab_size: int) -> Tensor:
    """Return transformers' tensor for a link, a copy made of our tensors in `state`. A bias that our model lacks is zero."""
    return link.join(_parts(state, link, vocab_size))


def _dtype(link: Link, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or link.ours[0].endswith(CHOICE_BIAS):  # transformers computes with this bias in fp32
        return tensor.dtype
    return dtype
