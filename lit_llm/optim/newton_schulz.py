"""The Newton–Schulz iteration that orthogonalises Muon's updates."""

from __future__ import annotations

import torch
from torch import Tensor

NS_DTYPES = ("auto", "float32", "bfloat16")


def newton_schulz_dtype(ns_dtype: str, device_type: str) -> torch.dtype:
    """The dtype of the iteration for the option `ns_dtype` of `MuonAdamW`. bf16 is precise enough for a direction."""
    if ns_dtype == "auto":
        ns_dtype = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[ns_dtype]


def newton_schulz(x: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate U Vᵀ of a matrix U S Vᵀ. Singular values end in about [0.7, 1.2].

    Quintic iteration X ← a X + (b A + c A²) X, A = X Xᵀ, from X / ‖X‖_F. With the coefficients of Jordan et al. 2024,
    singular values do not converge to exactly 1, but small ones grow faster.

    Takes one matrix, because in a batch its last bits depend on its place: kernels choose by alignment.

    Args:
        x: (r, c). A zero matrix stays zero.
        dtype: of the iteration and of the result.

    Returns:
        (r, c) in `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(0) > x.size(1)
    x = (x.mT if tall else x).to(dtype).contiguous()  # so that the Gram matrix is the smaller one
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # (r, r)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
