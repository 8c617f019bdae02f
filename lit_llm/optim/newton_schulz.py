"""The Newton–Schulz iteration that orthogonalises Muon's updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_llm.optim.owners import steps_together

Polynomial = tuple[float, float, float]

_JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
# The best sequence of odd quintics for singular values in [1e-3, 1]. Each quintic is the best for the interval that the
# quintics before it leave, with the lower end at least 0.024 times the upper end. The last quintic is used from step 8 on.
_POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # rounding makes singular values greater than the interval's upper end, beyond which the quintics explode


def newton_schulz_dtype(ns_dtype: str, device_type: str) -> torch.dtype:
    """The dtype of the Newton–Schulz iteration for the option `ns_dtype` of `MuonAdamW`: "auto" is fp32 on CPUs, else bf16."""
    if ns_dtype == "auto":
        ns_dtype = "float32" if device_type == "cpu" else "bfloat16"
    return torch.float32 if ns_dtype == "float32" else torch.bfloat16


def polynomials(ns_method: str, steps: int) -> list[Polynomial]:
    """The coefficients (a, b, c) of the polynomial a x + b x³ + c x⁵ of each of `steps` Newton–Schulz steps.

    jordan: equal in all steps (Jordan et al. 2024), for fast growth of small singular values, which end near 1, not at 1.
    polar_express: Amsel et al. 2025, arXiv 2505.16932, with their safety factor: x is divided by 1.01 before each of the first
    seven steps.
    """
    if ns_method == "jordan":
        return [_JORDAN] * steps
    *first, limit = _POLAR_EXPRESS
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in first]
    return (safe + [limit] * (steps - len(safe)))[:steps]


def newton_schulz(x: Tensor, *, steps: int, dtype: torch.dtype, ns_method: str = "jordan") -> Tensor:
    """Orthogonalise a matrix approximately: from X = U S Vᵀ (singular value decomposition) compute about U Vᵀ.

    After 5 steps, singular values that were at least 0.003 of ‖X‖_F are in [0.68, 1.21]; with polar_express in [0.86, 1.13].
    Smaller singular values end lower.

    Quintic iteration X ← a X + (b A + c A²) X, A = X Xᵀ, from X / ‖X‖_F; if r > c, X ← a X + X (b A + c A²), A = Xᵀ X.

    In fp32, if one side is more than twice as long as the other, three steps are computed from the Gram matrix A alone and
    applied to X at once: X ← (t I + S) X. With M = b A + c A² and P = a I + M, the following A is P A P, and
    S ← a S + t M + M S, t ← a t. For sides of 4 : 1 and 5 steps, this takes two thirds of the arithmetic of single steps.

    The function takes no batch of matrices, because a matrix's last bits would depend on its place in the batch: kernels are
    chosen by memory alignment. On one thread, a batch takes no less time than its matrices one by one.

    Args:
        x: (r, c). A zero matrix stays zero.
        dtype: dtype of the iteration and of the result.
        ns_method: "jordan" or "polar_express", see `polynomials`.

    Returns:
        (r, c) in `dtype`.
    """
    tall, together = x.size(0) > x.size(1), steps_together(x.size(0), x.size(1), dtype.itemsize)
    x = x.to(dtype).contiguous()
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=1e-7)
    for first in range(0, steps, together):
        t, s = _product(x.mT if tall else x, polynomials(ns_method, steps)[first : first + together])
        x = torch.addmm(x, x, s, beta=t) if tall else torch.addmm(x, s, x, beta=t)
    return x


def _product(x: Tensor, chosen: Sequence[Polynomial]) -> tuple[float, Tensor]:
    """Return t and S (r, r): Newton–Schulz steps with the polynomials `chosen` map x (r, c), r ≤ c, to (t I + S) x."""
    gram = x @ x.mT  # (r, r)
    (a, b, c), *further = chosen
    move = s = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # M; all matrices here are symmetric
    t = a
    for next_a, b, c in further:
        gram = torch.addmm(gram, move, gram, beta=a)
        gram = torch.addmm(gram, gram, move, beta=a)
        a, move = next_a, torch.addmm(gram, gram, gram, beta=b, alpha=c)
        s = torch.addmm(s, move, s, beta=a).add_(move, alpha=t)
        t *= a
    return t, s
