"""Each kernel of attention against attention in float64, forward and gradients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lit_llm.certify.check import Outcome, judged, skipped
from lit_llm.models.attention import Visibility, attend, choose

PROMISE = "attention equals float64"
KINDS = ("causal", "window", "documents", "softcap", "sinks", "all")
KERNELS = ("sdpa", "blocks", "flex")
NAMES = tuple(f"attention/{kernel}/{kind}" for kernel, kind in itertools.product(KERNELS, KINDS))
TOLERANCE = 2e-5  # of fp32, relative to the largest value: sums of 96 terms
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


def check(name: str, device: str) -> Outcome:
    """The largest error of output and gradients, relative to the largest value of each."""
    _, kernel, kind = name.split("/")
    window = WINDOW if kind in ("window", "all") else None
    softcap = SOFTCAP if kind in ("softcap", "all") else None
    documents, sinks = (kind in (each, "all") for each in ("documents", "sinks"))
    chosen = choose(
        kernel,  # type: ignore[arg-type]
        device,
        hides=window is not None or documents,
        caps=softcap is not None,
        sinks=sinks,
        drops=False,
    )
    if chosen != kernel:
        return skipped(name, PROMISE, f"{kernel} does not compute it on {device}: {chosen} does")
    return judged(name, PROMISE, _error(kernel, device, window, softcap, documents, sinks), TOLERANCE)


def _error(kernel: str, device: str, window: int | None, softcap: float | None, documents: bool, sinks: bool) -> float:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, LENGTH, heads, WIDTH) for heads in (HEADS, HEADS // 2, HEADS // 2)]
    exact = [torch.randn(shape, dtype=torch.float64, generator=generator).to(device).transpose(1, 2) for shape in shapes]
    exact += [torch.linspace(-1, 2, HEADS, dtype=torch.float64, device=device)] if sinks else []
    numbers = (torch.arange(LENGTH, device=device) // 11).expand(2, -1).contiguous() if documents else None
    wide = [x.requires_grad_() for x in exact]
    ours = [x.detach().float().requires_grad_() for x in exact]
    mask = None
    if kernel == "flex" and (window is not None or documents):
        from lit_llm.models.attention_flex import make_block_mask

        mask = make_block_mask(window, numbers, LENGTH, LENGTH, torch.device(device))
    see = Visibility(window, numbers, kernel, mask)  # type: ignore[arg-type]
    found = attend(*ours[:3], see=see, softcap=softcap, sinks=ours[3] if sinks else None)
    expected = naive(wide[0], wide[1], wide[2], window, numbers, softcap, wide[3] if sinks else None)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64, device=device).view(expected.shape)
    pairs = [(found, expected)]
    of_ours, of_wide = torch.autograd.grad(found, ours, weight.float()), torch.autograd.grad(expected, wide, weight)
    pairs += list(zip(of_ours, of_wide, strict=True))
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
