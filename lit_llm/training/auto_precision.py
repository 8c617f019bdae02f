"""Decides which Trainer precision the setting `trainer.precision: auto` means."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lit_llm.core._torch import cpu_has_bf16_units
from lit_llm.core.hardware import Hardware
from lit_llm.runs.resume import RunStart

KEY = "trainer.precision"
AUTO = "auto"
_NAMES = {True: "bf16-mixed", False: "32-true"}


class Choice(NamedTuple):
    """Record of a chosen precision for the Trainer, such as bf16-mixed, and of the reason, as the end of a sentence."""

    precision: str
    why: str

    @property
    def line(self) -> str:
        return f"trainer.precision auto is {self.precision}: {self.why}"


def choose(accelerator: Any) -> Choice:
    """Choose bf16-mixed if this machine's device is known to compute in bf16 in hardware, else 32-true.

    Args:
        accelerator: the setting `trainer.accelerator`, such as "cpu" or "auto".
    """
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or gpu is None:
        has_units = cpu_has_bf16_units()
        return Choice(_NAMES[has_units], f"the processor has {'units' if has_units else 'no units'} for bf16")
    if gpu.type == "cuda":
        return _of_gpu(torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False))
    return Choice("32-true", f"bf16 was not tried on {gpu.type}")


def choose_for(hardware: Hardware) -> Choice:
    """Choose bf16-mixed or 32-true for a device in the hardware table or in a user's hardware file."""
    if hardware.is_gpu:
        return _of_gpu(hardware.name, hardware.multiplies("bf16"))
    narrow, wide = hardware.peak_tflops["bf16"], hardware.peak_tflops["fp32"]
    faster = narrow is not None and wide is not None and narrow > wide
    said = "multiplies faster" if faster else "is not known to multiply faster"
    return Choice(_NAMES[faster], f"{hardware.name} {said} in bf16")


def _of_gpu(name: str, has_bf16: bool) -> Choice:
    return Choice(_NAMES[has_bf16], f"{name} has {'' if has_bf16 else 'no '}bf16")


def keep(start: RunStart, choice: Choice) -> Choice:
    """The precision that a continued or evaluated run saved in its checkpoint, whatever the device; for a new run, `choice`."""
    settings = {} if start.saved is None else start.saved.settings
    if KEY not in settings:
        return choice
    precision = str(settings[KEY] or "32-true")
    return Choice(precision, f"the precision of {start.checkpoint} (a new run would take {choice.precision})")
