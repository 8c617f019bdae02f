"""The base class of MuonAdamW and Lion: a step over the parameter groups, which is undone if `found_inf` is 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupOptimizer(Optimizer, ABC):
    """Base class of optimizers whose step updates one group after the other. If `found_inf` is 1, no tensor changes."""

    honours_found_inf = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Call `closure`, then update all parameters that have gradients. Return the closure's loss; None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update_group(group, params)
        return loss

    @abstractmethod
    def _update_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update `params`, the parameters of `group` with gradients; do nothing if `found_inf` is 1. Subclasses define this."""


@contextmanager
def undone_if(found_inf: Tensor | None, *lists: list[Tensor]) -> Iterator[None]:
    """Context manager that, at its end, restores the former values of the tensors in `lists` if ``found_inf`` is not 0.

    At its start it copies these tensors, because arithmetic cannot undo a step exactly: 0 · NaN is NaN, -0.0 + 0.0 is 0.0. If
    ``found_inf`` is None, it does nothing.
    """
    if found_inf is None:
        yield
        return
    saved = [(t, t.clone()) for tensors in lists for t in tensors]
    yield
    undo = {device: to_device(device, found_inf) != 0 for device in {t.device for t, _ in saved}}
    for t, old in saved:
        torch.where(undo[t.device], old, t, out=t)


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor to a device. The host waits for a copy to the CPU, but not for a copy to an accelerator."""
    return tensor.to(device, non_blocking=device.type != "cpu")
