"""Optimizers of the ladder that the library does not have, for one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.optim import MuonAdamW


class CautiousMuonAdamW(MuonAdamW):
    """MuonAdamW that decays only where update and weight have the same sign (Chen et al. 2025, arXiv 2510.12402).

    θ ← θ − η (u + λ 1[u θ > 0] θ); for AdamW groups too.
    """

    def _apply(self, group: dict[str, Any], params: Any, updates: list[Tensor], *rest: Any) -> None:
        self._cautiously(group, params, lambda: super(CautiousMuonAdamW, self)._apply(group, params, updates, *rest))

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        self._cautiously(group, params, lambda: super(CautiousMuonAdamW, self)._adamw(group, params))

    def _cautiously(self, group: dict[str, Any], params: Any, step: Callable[[], None]) -> None:
        decay, old = group["weight_decay"], [p.clone() for p in params]
        group["weight_decay"] = 0.0
        step()
        group["weight_decay"] = decay
        for p, before in zip(params, old, strict=True):
            p.sub_(group["lr"] * decay * before * ((before - p) * before > 0))


class QuinticsMuonAdamW(MuonAdamW):
    """MuonAdamW with other coefficients (a, b, c) for each step of its iteration X ← a X + (b A + c A²) X, A = X Xᵀ."""

    def __init__(self, params: Iterable[Any], *, quintics: Sequence[tuple[float, float, float]], **options: Any):
        self.quintics = quintics
        super().__init__(params, **options)

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        x = update.mT if update.size(0) > update.size(1) else update
        x = x / x.norm().clamp(min=1e-7)
        for a, b, c in self.quintics:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if update.size(0) > update.size(1) else x


class SoapAdamW(MuonAdamW):
    """SOAP for matrices (Vyas et al. 2024, arXiv 2409.11321, algorithm 3), AdamW for the rest.

    Adam in the eigenbasis of Shampoo's L = E[G Gᵀ], R = E[Gᵀ G]; the basis by one power iteration and QR every `every` steps.
    `lr` is AdamW's kind of rate.
    """

    def __init__(
        self, params: Iterable[Any], *, soap_betas: tuple[float, float] = (0.95, 0.95), every: int = 10, **options: Any
    ):
        self.soap_betas, self.every = soap_betas, every
        super().__init__(params, **options)

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = self.soap_betas
        for p in params:
            g, s = p.grad, self.state[p]
            assert g is not None
            if not s:  # the first step only sets the preconditioner
                s["L"], s["R"] = (1 - beta2) * g @ g.mT, (1 - beta2) * g.mT @ g
                s["QL"], s["QR"] = (torch.linalg.eigh(m + 1e-30 * torch.eye(len(m)))[1].flip(1) for m in (s["L"], s["R"]))
                s["m"], s["v"], s["t"] = torch.zeros_like(g), torch.zeros_like(g), 0
                continue
            s["t"] += 1
            s["m"].lerp_(g, 1 - beta1)
            rotated = s["QL"].mT @ g @ s["QR"]
            s["v"].lerp_(rotated.square(), 1 - beta2)
            m = s["QL"].mT @ s["m"] @ s["QR"]
            step = (m / (1 - beta1 ** s["t"])) / ((s["v"] / (1 - beta2 ** s["t"])).sqrt() + 1e-8)
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(s["QL"] @ step @ s["QR"].mT, alpha=group["lr"])
            s["L"].lerp_(g @ g.mT, 1 - beta2)
            s["R"].lerp_(g.mT @ g, 1 - beta2)
            if s["t"] % self.every == 0:
                for side, basis in (("L", "QL"), ("R", "QR")):
                    order = torch.argsort((s[basis].mT @ s[side] @ s[basis]).diagonal(), descending=True)
                    s["v"] = s["v"].index_select(0 if side == "L" else 1, order)
                    s[basis] = torch.linalg.qr(s[side] @ s[basis][:, order])[0]


class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1): the average x of the steps' iterates z.

    Gradients are taken at y = (1 − β1) z + β1 x, which the parameters are in training; `eval` makes them x. With
    γ_t = η_t √(1 − β2^t), whose square is the weight of z in x:

        v ← β2 v + (1 − β2) g²;   z ← z − γ_t (g / (√v + ε) + λ y);   x ← (1 − c) x + c z,  c = γ_t² / Σ γ²
    """

    def __init__(
        self, params: Any, lr: float = 0.005, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "sum": 0.0, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["t"] += 1
            rate = group["lr"] * math.sqrt(1 - beta2 ** group["t"])
            group["sum"] += rate**2
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"], state["v"] = p.clone(), torch.zeros_like(p)
                z, y = state["z"], p.clone()
                x = y.lerp(z, 1 - 1 / beta1)
                state["v"].lerp_(p.grad.square(), 1 - beta2)
                z.sub_(p.grad / (state["v"].sqrt() + 1e-8) + group["weight_decay"] * y, alpha=rate)
                p.copy_(z.lerp(x.lerp_(z, rate**2 / group["sum"]), beta1))

    @torch.no_grad()
    def eval(self) -> None:
        """Parameters become x, from y = z + β1 (x − z)."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], 1 - 1 / group["betas"][0])

    @torch.no_grad()
    def train(self) -> None:
        """Undo `eval`."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], 1 - group["betas"][0])
