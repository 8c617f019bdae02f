"""Optimizers of the ladder that the library does not have, for one process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.optim import MuonAdamW

Coefficients = tuple[tuple[float, float, float], ...]

JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Jordan et al. 2024, the same in every step."""

POLAR_EXPRESS: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Amsel et al. 2025, arXiv 2505.16932: the best odd quintics one after the other, for singular values in [1e-3, 1]."""

CLASSIC: Coefficients = ((2.0, -1.5, 0.5),) * 5
"""Converges to exactly 1, but slowly: p(1) = 1, p'(1) = 0, p''(1) = 0."""


def polar_express(steps: int, safety: float = 1.01) -> Coefficients:
    """The first steps with the paper's safety factor: x is divided by it before all polynomials but the last."""
    safe = [(a / safety, b / safety**3, c / safety**5) for a, b, c in POLAR_EXPRESS[: steps - 1]]
    return (*safe, POLAR_EXPRESS[steps - 1])


def orthogonal(x: Tensor, coefficients: Coefficients, dtype: torch.dtype = torch.float32) -> Tensor:
    """X ← a X + (b A + c A²) X, A = X Xᵀ, from X / ‖X‖_F, with its own coefficients in each step."""
    tall = x.size(0) > x.size(1)
    x = (x.mT if tall else x).to(dtype).contiguous()
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonVariant(MuonAdamW):
    """MuonAdamW with the techniques of 2025 and 2026. All are off by default.

    Args:
        coefficients: of each Newton–Schulz step.
        second_moment: β2 of NorMuon (Li et al. 2025, arXiv 2510.05491): v ← β2 v + (1 − β2) mean over a row of O²;
            O / √v, scaled back to the norm of O. The mean is over the longer dimension, as in nanochat.
        cautious: decay only where update and weight have the same sign (Chen et al. 2025, arXiv 2510.12402):
            θ ← θ − η (u + λ 1[u θ > 0] θ); for AdamW groups too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        coefficients: Coefficients | None = None,
        second_moment: float | None = None,
        by: str = "long",
        cautious: bool = False,
        **options: Any,
    ) -> None:
        self.coefficients, self.second_moment, self.cautious, self.by = coefficients, second_moment, cautious, by
        super().__init__(params, **options)

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        if self.coefficients is None:
            return super()._orthogonal(group, update)
        return orthogonal(update, self.coefficients)

    def _apply(self, group: dict[str, Any], params: Any, updates: list[Tensor]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        for p, update in zip(params, updates, strict=True):
            if self.second_moment is not None:
                update = self._normalised(p, update)
            scale = math.sqrt(max(1.0, p.size(0) / p.size(1)))
            if group["adjust_lr"] != "original":
                scale = 0.2 * math.sqrt(max(p.shape))
            if self.cautious:
                p.sub_(lr * decay * p * (update * p > 0))
            else:
                p.mul_(1 - lr * decay)
            p.add_(update, alpha=-lr * scale)

    def _normalised(self, p: Tensor, update: Tensor) -> Tensor:
        beta2, state = self.second_moment, self.state[p]
        assert beta2 is not None
        dim = (1 if p.size(0) >= p.size(1) else 0) if self.by == "long" else 1
        mean = update.square().mean(dim=dim, keepdim=True)
        if "row_square" not in state:
            state["row_square"] = torch.zeros_like(mean)
        state["row_square"].lerp_(mean, 1 - beta2)
        found = update / (state["row_square"].sqrt() + 1e-10)
        return found * (update.norm() / found.norm().clamp(min=1e-10))

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not self.cautious or group["weight_decay"] == 0:
            super()._adamw(group, params)
            return
        decay, old = group["weight_decay"], [p.clone() for p in params]
        group["weight_decay"] = 0.0
        super()._adamw(group, params)
        group["weight_decay"] = decay
        for p, before in zip(params, old, strict=True):
            p.sub_(group["lr"] * decay * before * ((before - p) * before > 0))


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
