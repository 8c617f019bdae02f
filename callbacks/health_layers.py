"""Finds the layers of any model by name, and measures their squared norms, norms of updates, and shares of zero gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import takewhile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ._torch import local_part
from .contracts import SplitsLayers, offered
from .health_readings import Readings

SAMPLED = 2**14
"""About how many weights of a layer are sampled on a rank to estimate the norm of an update."""


def trained_parameters(trainer: Trainer, pl_module: LightningModule) -> tuple[list[tuple[str, Tensor]], int]:
    """The (name, parameter) pairs of the trainer's only optimizer, and the number of ranks that hold each parameter or a shard.

    In a pipeline, a rank lists only the parameters of its stage, without tied copies that count on another rank.
    """
    pipeline = offered(trainer.strategy, SplitsLayers)
    ranks, repeated = (1, ()) if pipeline is None else (pipeline.pipeline_mesh.size(), pipeline.repeated_parameters)
    trained = {p for group in trainer.optimizers[0].param_groups for p in group["params"] if p not in repeated}
    return [
        (name, p) for name, p in pl_module.named_parameters() if p in trained and p.requires_grad
    ], trainer.world_size // ranks


def find_blocks(module: nn.Module) -> tuple[str, dict[str, nn.Module]]:
    """Return the path of the model's list of blocks, and {number: block}: the outermost list with the most parameters.

    A list is an `nn.ModuleList`, or an `nn.ModuleDict` whose keys are numbers. Returns ("", {}) if there is no list.
    """
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, each in module.named_modules():
        numbered = isinstance(each, nn.ModuleList) or (isinstance(each, nn.ModuleDict) and all(k.isdigit() for k in each))
        if numbered and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = dict(each.named_children())

    def size(name: str) -> int:
        return sum(p.numel() for block in lists[name].values() for p in block.parameters())

    path = max(lists, key=size, default="")
    return (path, lists[path]) if path and size(path) else ("", {})


def layers_of(named: Iterable[tuple[str, Tensor]], blocks: str) -> dict[str, list[Tensor]]:
    """Layer name → parameters of the layer. A name omits the path to the model: `embedding`, `blocks.0.attention`, `norm`.

    Args:
        named: parameters with their paths.
        blocks: path of the list of blocks; "" if there is none. A block's layers are its submodules, the other layers are the
            modules beside the list.
    """
    named = list(named)
    root = blocks.split(".")[:-1]
    if not blocks and named:  # what all begin with: in sorted order, the first and the last one do
        paths = sorted(name.split(".")[:-2] for name, _ in named)
        root = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(paths[0], paths[-1], strict=False))]
    depth = len(root)
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in named:
        parts = name.split(".")
        parts = parts[depth:] if parts[:depth] == root else parts
        in_block = bool(blocks) and parts[0] == blocks.rpartition(".")[2] and len(parts) > 2
        length = min(3, len(parts) - 1) if in_block else 1
        layers.setdefault(".".join(parts[:length]), []).append(parameter)
    return layers


def share_of_square(tensor: Tensor, ranks: int) -> Tensor:
    """This rank's part of the squared norm of a tensor, as a 0-d tensor. The sum over the ranks is the squared norm.

    Args:
        ranks: number of ranks that hold the tensor or parts of it.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    local = local_part(tensor)
    dtype = torch.promote_types(local.dtype, torch.float32)
    return torch.linalg.vector_norm(local, dtype=dtype).square() / copies(tensor, ranks)


def copies(tensor: Tensor, ranks: int) -> float:
    """Number of ranks, with this one, that have the same part of a tensor. `ranks`: number of ranks that hold parts of it."""
    if not isinstance(tensor, DTensor):
        return ranks
    sizes = (tensor.device_mesh.size(i) for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return ranks / math.prod(sizes)


class UpdateSample:
    """Estimates the norm of an optimizer's update from every n-th weight, which is copied before the update.

    A copy of all weights would make the norm exact, but would take memory.

    Args:
        layers: parameters by layer.
    """

    def __init__(self, layers: dict[str, list[Tensor]]) -> None:
        self._before = {  # parameter, stride, weights
            layer: [(p, s, _every(p, s).clone()) for p, s in strides(parameters)] for layer, parameters in layers.items()
        }

    def add_to(self, readings: Readings, layer: str, ranks: int) -> None:
        """Add to `readings` the estimated norm of a layer's update, after that update.

        Args:
            ranks: number of ranks that hold the layer or parts of it.
        """
        for parameter, stride, before in self._before.get(layer, ()):
            if before.numel() == 0:  # a shard may be empty
                continue
            change = _every(parameter, stride).to(torch.promote_types(before.dtype, torch.float32)) - before
            share = local_part(parameter).numel() / before.numel() / copies(parameter, ranks)
            readings.root_mean(f"health/update_norm/{layer}", torch.linalg.vector_norm(change).square() * share, 0.0)


def add_zero_gradients(readings: Readings, layer: str, parameters: list[Tensor], ranks: int) -> None:
    """Add to `readings` the share of zeros among every n-th element of the gradients of a layer's matrices.

    Layers outside blocks (without a dot in the name) are left out: most rows of an embedding have no gradient.

    Args:
        ranks: number of ranks that hold the layer or parts of it.
    """
    for parameter, stride in strides(parameters):
        if parameter.grad is None or parameter.dim() < 2 or "." not in layer:
            continue
        gradient = _every(parameter.grad, stride)
        if gradient.numel():
            share = local_part(parameter).numel() / gradient.numel() / copies(parameter, ranks)
            readings.mean("health/zero_gradients", (gradient == 0).sum() * share, gradient.numel() * share)


def strides(parameters: list[Tensor]) -> list[tuple[Tensor, int]]:
    """Return (parameter, n) for each parameter of a layer: every n-th weight is sampled, about `SAMPLED` weights in all."""
    wanted = math.ceil(sum(local_part(p).numel() for p in parameters) / SAMPLED)
    return [(p, _stride(p, wanted)) for p in parameters]


def _stride(parameter: Tensor, wanted: int) -> int:
    """Return a stride, at least `wanted`, that has no factor in common with a row's length, so that all columns are sampled."""
    width = max(1, parameter.shape[-1]) if parameter.dim() else 1
    while math.gcd(wanted, width) > 1:
        wanted += 1
    return max(1, wanted)


def _every(parameter: Tensor, stride: int) -> Tensor:
    return local_part(parameter).detach().reshape(-1)[::stride]
