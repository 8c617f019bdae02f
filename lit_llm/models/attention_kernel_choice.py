"""Chooses the kernel that computes attention in each layer from `compute.attention`, and refuses values that cannot work.

`attention` calls torch's scaled_dot_product_attention, `attention_flex` calls FlexAttention, and `attention_blocks` computes
attention in blocks. This file needs no torch, because the command line and the planner import it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from lit_llm.models.config import GPTConfig

if TYPE_CHECKING:
    import torch


AttentionKernel = Literal["auto", "sdpa", "flash3", "flash4", "flex", "blocks"]
"""The values of `compute.attention`."""
_FLASH: dict[AttentionKernel, tuple[str, str, tuple[int, ...]]] = {
    "flash3": ("FA3", "flash_attn_interface", (9,)),
    "flash4": ("FA4", "flash_attn.cute", (9, 10)),
}
"""Kernel → (torch's name of the implementation, Python module of the implementation, supported major compute capabilities)."""
_MEND = "use --compute.attention auto"


def choose(
    kernel: AttentionKernel, device: str, *, hides: bool, caps: bool, sinks: bool, drops: bool
) -> Literal["sdpa", "flex", "blocks"]:
    """Return which of three kernels computes attention in a layer. No other function chooses among these three.

    sdpa: torch's scaled_dot_product_attention, for plain causal attention; torch then runs a flash kernel: on CUDA torch's own
    kernel, cuDNN's, FlashAttention-3 or -4. flex: FlexAttention. blocks: `attention_blocks`.

    Args:
        kernel: `compute.attention`. "blocks" always gives blocks. "flex" gives flex also for plain causal attention on CUDA.
            With all other values, only the other arguments decide.
        device: type of the device.
        hides: whether a window or documents hide earlier positions.
        caps: whether scores have a soft cap.
        sinks: whether heads have sinks.
        drops: whether attention weights are dropped.
    """
    if kernel == "blocks":
        return "blocks"
    if drops:
        return "blocks"  # the other kernels draw from a generator, or have no dropout
    plain = not (hides or caps or sinks)
    if device != "cuda":
        return "sdpa" if plain else "blocks"  # FlexAttention has a backward pass on CUDA only
    return "sdpa" if plain and kernel != "flex" else "flex"


def attention_problem(config: GPTConfig, kernel: AttentionKernel, device: torch.device) -> str | None:
    """Return why `kernel` (`compute.attention`) cannot work for the model on this machine's device; None if `kernel` works."""
    import torch  # the planner and the command line read this file without it

    capability, name = None, device.type
    if device.type == "cuda" and kernel in _FLASH:
        capability, name = torch.cuda.get_device_capability(device)[0], torch.cuda.get_device_name(device)
    if problem := unsupported_attention(config, kernel, device.type, capability=capability, name=name):
        return problem
    if kernel in _FLASH:
        _, module, _ = _FLASH[kernel]
        if not _exists(module):
            return f"compute.attention is {kernel}, but its module {module} is not installed: {_MEND}"
    return None


def unsupported_attention(
    config: GPTConfig, kernel: AttentionKernel, device_type: str, *, capability: int | None, name: str
) -> str | None:
    """Return why `kernel` cannot work for the model on a kind of device, whatever is installed; None if `kernel` can work.

    Args:
        capability: major compute capability of an NVIDIA GPU, needed for FlashAttention-3 and -4 only.
        name: the device's name, for the message.
    """
    named, mend = f"compute.attention is {kernel}", _MEND
    if kernel == "flex":
        if device_type != "cuda":
            return f"{named}, but FlexAttention has no backward pass on {device_type}: {mend}"
        if config.dropout:
            return (
                f"{named}, but FlexAttention has no dropout and model.dropout is {config.dropout}: {mend}, or --model.dropout 0"
            )
    if kernel in ("sdpa", "flash3", "flash4") and "sdpa" not in _choices(config, kernel, device_type):
        return f"{named}, which needs plain causal attention, but no layer has it ({_uses(config)}): {mend}"
    if kernel in _FLASH:
        _, _, majors = _FLASH[kernel]
        if capability not in majors:
            needed = " or ".join(f"{major}.x" for major in majors)
            return f"{named}, which needs an NVIDIA GPU of compute capability {needed}, but this device is {name}: {mend}"
    return None


def flash_implementation(config: GPTConfig, kernel: AttentionKernel, device: torch.device) -> AttentionKernel | None:
    """Return the FlashAttention that SDPA will use: `kernel` if this is flash3 or flash4; with auto, the first of flash3 and
    flash4 that works for the model on `device`. None: torch's own kernel."""
    if kernel != "auto":
        return kernel if kernel in _FLASH else None
    return next((name for name in _FLASH if attention_problem(config, name, device) is None), None)


def activate_flash(implementation: AttentionKernel) -> None:
    """Make SDPA use FlashAttention-3 ("flash3") or -4 ("flash4") in this process."""
    import torch

    torch.nn.attention.activate_flash_attention_impl(_FLASH[implementation][0])


def describe(config: GPTConfig, kernel: AttentionKernel, device: torch.device) -> str:
    """Return one line of text: which kernels the layers use, how many layers use each kernel, and with which features."""
    flash = flash_implementation(config, kernel, device)
    lines = []
    for choice, layers in _choices(config, kernel, device.type).items():
        if choice == "sdpa":
            cuda = f"FlashAttention-{flash[-1]}" if flash else "torch's flash or cuDNN kernel"
            what = cuda if device.type == "cuda" else f"torch's kernel for {device.type}"
        elif choice == "flex":
            what = "FlexAttention, with a block mask of each batch"
        elif device.type == "cpu" and not (config.dropout or config.attention_softcap):
            what = "torch's flash kernel for cpu, on one block of positions after another"
        else:
            what = "plain torch, one block of positions after another"
        lines.append(f"{choice} in {len(layers)} of {config.n_blocks} layers ({_uses(config, layers)}): {what}")
    return "attention: " + "; ".join(lines) + " (--compute.attention)"


def _choices(config: GPTConfig, kernel: AttentionKernel, device_type: str) -> dict[str, list[int]]:
    """Return for each kernel in use the numbers of the layers that use it."""
    layers: dict[str, list[int]] = {}
    for i in range(config.n_blocks):
        choice = choose(
            kernel,
            device_type,
            hides=config.layer(i).window is not None or config.mask_documents,
            caps=config.attention_softcap is not None,
            sinks=config.attention_sinks,
            drops=config.dropout > 0,
        )
        layers.setdefault(choice, []).append(i)
    return layers


def _uses(config: GPTConfig, layers: list[int] | None = None) -> str:
    """Return the features of attention in `layers` (None: all layers) as text: "window 512, documents", or if no layer has a
    window "causal, documents"."""
    windows = {config.layer(i).window for i in (range(config.n_blocks) if layers is None else layers)}
    named = [f"window {window}" if window else "all positions" for window in sorted(windows, key=lambda w: w or 0)]
    if named == ["all positions"]:
        named = ["causal"]
    more = {
        "documents": config.mask_documents,
        "softcap": config.attention_softcap is not None,
        "sinks": config.attention_sinks,
        "dropout": config.dropout > 0,
    }
    return ", ".join([*named, *(name for name, on in more.items() if on)])


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
