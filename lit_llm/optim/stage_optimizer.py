"""The optimizer of a pipeline stage: it has the groups of the whole model's optimizer, with the parameters of the stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_llm.optim.transfer import optimizer_of


def optimizer_of_stage(
    make: Callable[[list[dict[str, Any]]], Optimizer], whole: nn.Module
) -> tuple[Optimizer, list[list[str]]]:
    """(the optimizer of what this rank holds, the names of the whole model's parameters by group).

    The optimizer of the whole model is made, as on one process, and loses what other ranks hold. So groups are the same on
    all ranks, in the same order, whatever the optimizer's class makes of them. A group without parameters here is empty.

    Args:
        make: makes an optimizer from groups of parameters.
        whole: all stages. Parameters that this rank does not hold are on the meta device.
    """
    name_of = {p: name for name, p in whole.named_parameters()}
    optimizer = optimizer_of(whole, make)
    names = [[name_of[p] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not p.is_meta]
    for p in [p for p in optimizer.state if p.is_meta]:  # some classes make their state when they are made
        del optimizer.state[p]
    return optimizer, names
