"""Each kernel of attention against attention in float64, forward and gradients."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.models.attention import attend, visibilities
from lit_llm.models.attention_kernel_choice import AttentionKernel, activate_flash, attention_problem, choose
from lit_llm.models.config import GPTConfig

KINDS = ("causal", "window", "documents", "softcap", "sinks", "all")
KERNELS = ("sdpa", "blocks", "flex", "flash3", "flash4")
KINDS_OF = dict.fromkeys(("sdpa", "flash3", "flash4"), ("causal",))
"""Of kernels that compute plain causal attention only."""
TOLERANCES = {"flash3": 2**-6, "flash4": 2**-6}
"""Relative to the largest value, of kernels that compute in bf16: four steps of its 8 bits. The others compute in fp32."""
FP32_TOLERANCE = 2e-5  # sums of 96 terms
WINDOW, SOFTCAP, LENGTH, HEADS, WIDTH = 7, 2.0, 96, 4, 16


def naive(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax over all scores with a dense mask: (B, H, T, h)."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.size(2), device=q.device)
    back = position[:, None] - position[None, :]
    hidden = (back < 0) if window is None else (back < 0) | (back >= window)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., : k.size(2)] @ v


def error(folder: Path, *, ranks: int, accelerator: str, kernel: AttentionKernel, kind: str) -> dict[str, float]:
    """The largest error of output and gradients, relative to the largest value of each.

    Raises:
        UserError: The kernel does not compute this kind on the device.
    """
    window = WINDOW if kind in ("window", "all") else None
    softcap = SOFTCAP if kind in ("softcap", "all") else None
    documents, sinks = (kind in (each, "all") for each in ("documents", "sinks"))
    device, is_flash = torch.device(accelerator), kernel in TOLERANCES
    if is_flash and (problem := attention_problem(GPTConfig(), kernel, device)):
        raise UserError(problem)
    hides = window is not None or documents
    chosen = choose(kernel, accelerator, hides=hides, caps=softcap is not None, sinks=sinks, drops=False)
    if chosen != ("sdpa" if is_flash else kernel):
        raise UserError(f"{kernel} does not compute it on {accelerator}: {chosen} does")
    if is_flash:
        activate_flash(kernel)
    dtype, generator = torch.bfloat16 if is_flash else torch.float32, torch.Generator().manual_seed(1)
    shapes = [(2, LENGTH, heads, WIDTH) for heads in (HEADS, HEADS // 2, HEADS // 2)]
    ours = [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]
    ours += [torch.linspace(-1, 2, HEADS).to(device, dtype)] if sinks else []
    exact = [x.double().requires_grad_() for x in ours]
    ours = [x.requires_grad_() for x in ours]
    numbers = (torch.arange(LENGTH, device=device) // 11).expand(2, -1).contiguous() if documents else None
    config = GPTConfig(window=window, attention_softcap=softcap, attention_sinks=sinks)
    see = visibilities(config, torch.empty(2, LENGTH, device=device), numbers, kernel, cached=0)[window]
    found = attend(*ours[:3], see=see, softcap=softcap, sinks=ours[3] if sinks else None)
    expected = naive(exact[0], exact[1], exact[2], window, numbers, softcap, exact[3] if sinks else None)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64, device=device).view(expected.shape)
    of_ours, of_exact = torch.autograd.grad(found, ours, weight.to(dtype)), torch.autograd.grad(expected, exact, weight)
    pairs = [(found, expected), *zip(of_ours, of_exact, strict=True)]
    return {"error": max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)}
