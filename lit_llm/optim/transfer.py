"""Makes the optimizer of a model or of a pipeline stage, and scales learning rates with the model's width and depth.

The aim of the scaling: rates that are best for a small model, the base model, become rates that are best for a large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_llm.core.errors import UserError
from lit_llm.optim.parameter_groups import parameter_groups

_LIKE_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Lion")
"""Optimizer classes whose updates have about the same size in every element, whatever the gradient's size."""

RATE_OF_BATCH = {"SGD": (1.0, "linear for SGD: Goyal et al. 2017, arXiv 1706.02677")} | dict.fromkeys(
    (*_LIKE_ADAM, "RMSprop", "Muon", "MuonAdamW"), (0.5, "square root for Adam: Malladi et al. 2022, arXiv 2205.10287")
)
"""Name of an optimizer → (p, source), for the rule that the best learning rate is proportional to (batch size)^p."""


def optimizer_of(model: nn.Module, make: Callable[[list[dict[str, Any]]], Optimizer]) -> Optimizer:
    """Make the optimizer of a model's parameters. If the model has `size_ratios` (its width and depth divided by a base
    model's), `scale_rates` scales the learning rates, weight decays and epsilons of the optimizer's groups.

    Args:
        make: parameter groups → optimizer.

    Raises:
        UserError: `scale_rates` has no rule for this optimizer.
    """
    optimizer = make(parameter_groups(model))
    ratios: tuple[float, float] | None = getattr(model, "size_ratios", None)
    if ratios is not None:
        scale_rates(optimizer, *ratios)
    return optimizer


def optimizer_of_stage(
    make: Callable[[list[dict[str, Any]]], Optimizer], whole: nn.Module
) -> tuple[Optimizer, list[list[str]]]:
    """Make the optimizer of this pipeline rank's parameters. Return it, and each group's parameter names in the whole model.

    The optimizer is made for the whole model, as in one process; then the parameters of other ranks are removed. So all ranks
    have the same groups in the same order, even if the optimizer's class splits groups. Groups may be empty on a rank.

    Args:
        make: parameter groups → optimizer.
        whole: the model with all stages. Parameters that this rank does not hold are on the meta device.
    """
    name_of = {p: name for name, p in whole.named_parameters()}
    optimizer = optimizer_of(whole, make)
    names = [[name_of[p] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not p.is_meta]
    for p in [p for p in optimizer.state if p.is_meta]:  # some classes make their state when they are made
        del optimizer.state[p]
    return optimizer, names


def scale_rates(optimizer: Optimizer, width: float, depth: float) -> None:
    """Scale each group's learning rate, weight decay and epsilon, which are right for a base model, to this model's size.

    The rates are multiplied by these factors, with w = `width` and L = `depth`, the width and depth of this model divided by
    the width and depth of the base model, and (r, c) the shape of a matrix:

    ===========  ===========  ==============  ===============================================
    group        AdamW        Muon            why
    ===========  ===========  ==============  ===============================================
    embedding    1                            reads one row: its update does not grow with w
    matrix       1/w          1               an update moves its output by rate · c, or by rate · √(r/c) · √c
    projection   1/(w·L)      1/L             as matrix, and L blocks add to one stream
    head         1/w                          as matrix
    vector       1
    ===========  ===========  ==============  ===============================================

    Muon with ``adjust_lr="match_rms_adamw"`` has updates that grow with √w, so its factors are divided by √w. Adapters keep
    their rates. The decay of a step, rate · weight_decay, stays equal to the base model's. Epsilon is scaled like the size of
    the gradients: by 1/(w·L) for matrix, 1/w for projection and embedding, 1 for head and vector.

    Sources: Yang et al. 2022 (arXiv 2203.03466, table 3) for AdamW; Yang, Simon and Bernstein 2023 (2310.17813) for Muon, whose
    updates have the spectral norm √(r/c) already (Bernstein and Newhouse 2024, 2410.21265); Dey et al. 2025 (2505.01618,
    CompleteP) for depth, decay and epsilon. Dey et al. multiply each residual branch by 1/L. Here instead the rate and initial
    weights of the branch's last matrix have the factor 1/L, so that the forward pass does not change.

    Raises:
        UserError: the updates of this optimizer follow no known rule.
    """
    for group in optimizer.param_groups:
        role = str(group["name"]).removesuffix("_adamw")
        rate = {"projection": 1 / depth}.get(role, 1.0)
        if role in ("matrix", "projection", "head"):
            rate *= _of_matrices(optimizer, group, width)
        group["lr"] = group["lr"] * rate
        group["weight_decay"] = group["weight_decay"] / rate
        gradients = {"matrix": width * depth, "projection": width, "embedding": width}.get(role, 1.0)
        if "eps" in group:
            group["eps"] = group["eps"] / gradients


def _of_matrices(optimizer: Optimizer, group: dict[str, Any], width: float) -> float:
    """Return the factor by which a group's learning rate is multiplied if its matrices have `width` times the base's inputs."""
    algorithm = group.get("algorithm", type(optimizer).__name__)
    if algorithm == "muon":
        return 1.0 if group["adjust_lr"] == "original" else 1 / math.sqrt(width)
    if algorithm in ("adamw", *_LIKE_ADAM):
        return 1 / width
    raise UserError(
        f"model.base_width and model.base_depth have rules for MuonAdamW, {', '.join(_LIKE_ADAM[:-1])} and {_LIKE_ADAM[-1]}, "
        f"but the optimizer is {algorithm} (--optimizer MuonAdamW, or --model.base_width null --model.base_depth null)"
    )
