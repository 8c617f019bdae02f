"""Undo an optimizer step on the device if `found_inf` is 1 (torch's fused optimizers read the same attribute)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def undone_if(found_inf: Tensor | None, *lists: list[Tensor]) -> Iterator[None]:
    """Restore the tensors' old values after the block if ``found_inf`` is not 0. Does nothing if it is None.

    Copies the tensors, because arithmetic cannot undo a step exactly: 0 · NaN is NaN, and -0.0 + 0.0 is 0.0.
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
    """Copy a tensor to a device, without synchronising. A copy to the host waits, or the host would read it too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")
