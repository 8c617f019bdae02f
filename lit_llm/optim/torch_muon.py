"""An optimizer with the arguments and the iteration of `torch.optim.Muon`, for all parameters and any layout of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from torch import Tensor

from lit_llm.core._torch import torch_newton_schulz
from lit_llm.core.number_domain import above, at_least, below, check_ranges, whole
from lit_llm.optim.muon import MuonAdamW

REPLACED = "torch.optim.Muon"
"""If a recipe names this class path for its optimizer, lit_llm uses `TorchMuon` in place of that class."""


class TorchMuon(MuonAdamW):
    """`torch.optim.Muon` for hidden matrices, and AdamW for all other parameters, both with `lr` and `weight_decay`.

    `torch.optim.Muon` takes matrices only, while a LightningModule with automatic optimization needs one optimizer. This class
    has the arguments of `torch.optim.Muon` and calls torch's Newton–Schulz iteration, always in bf16. On plain fp32 matrices,
    steps of both classes are equal bit for bit. As in `MuonAdamW` are the choice of hidden matrices, distributed parameters,
    ``found_inf``, and steps of bf16 parameters, which are rounded once. AdamW has β = (0.9, 0.95) and ε = 1e-8.

    Args:
        adjust_lr_fn: `adjust_lr` of `MuonAdamW`; None is "original".
        eps: smallest norm by which the iteration divides the matrix before the first step.

    Raises:
        UserError: an option is out of range.
    """

    _MUON_ONLY = MuonAdamW._MUON_ONLY | {"ns_coefficients", "ns_eps"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: Annotated[float, at_least(0, 10_000)] = 1e-3,
        weight_decay: Annotated[float, at_least(0, 10_000)] = 0.1,
        momentum: Annotated[float, below(0, 1)] = 0.95,
        nesterov: bool = True,
        ns_coefficients: Annotated[tuple[float, float, float], at_least(-10_000, 10_000)] = (3.4445, -4.7750, 2.0315),
        eps: Annotated[float, above(0, 1)] = 1e-7,
        ns_steps: Annotated[int, whole(1, 99)] = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
    ) -> None:
        check_ranges(TorchMuon, locals())
        self._iteration: dict[str, Any] = {"ns_coefficients": tuple(ns_coefficients), "ns_eps": eps}
        super().__init__(
            params,
            lr=lr,
            adamw_lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr=adjust_lr_fn or "original",
            ns_dtype="bfloat16",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**self._iteration, **param_group})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state. Keep the restored Newton–Schulz options, so that groups added later get the same options."""
        muon: dict[str, Any] = next((group for group in state["param_groups"] if group["algorithm"] == "muon"), {})
        self._iteration = {name: muon[name] for name in ("ns_coefficients", "ns_eps") if name in muon}
        super().__setstate__(state)

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        return torch_newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])
