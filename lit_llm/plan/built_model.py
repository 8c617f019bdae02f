"""Build the model that a plan traces or whose parameters it counts: on the meta device, with all or some of its blocks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_llm.core.errors import UserError
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.gpt import GPT

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig


def build_gpt(config: GPTConfig, lora: LoRAConfig | None) -> GPT:
    """Build and return a GPT on the meta device, with LoRA adapters if `lora` is set."""
    with torch.device("meta"):
        model = GPT(config)
        if lora is not None:
            from lit_llm.models.lora import apply_lora

            apply_lora(model, lora)
    return model


def build_own(architecture: Architecture, vocab_size: int | None) -> CustomModel:
    """Build and return a user's module on the meta device, or on the CPU if its `__init__` fails on the meta device.

    Raises:
        UserError: the module's `__init__` fails on both devices.
    """
    for device in ("meta", "cpu"):
        try:
            with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
                return CustomModel(GPTConfig(vocab_size=vocab_size), architecture, device)
        except UserError:
            raise
        except Exception as error:  # the user's code may raise any exception
            reason = error
    raise UserError(f"architecture {architecture.class_path} cannot be built: {said(reason)} (--architecture)") from reason


def said(error: BaseException) -> str:
    """Return one line about an exception of the user's code: class, first line of the message, file and line of the code."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}{place(error)}"


def place(error: BaseException) -> str:
    """Return " (FILE, line N)" for the last frame of the traceback outside torch and lit_llm; "" if no frame is outside."""
    others = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def with_layers(config: GPTConfig, layers: Sequence[int]) -> GPTConfig:
    """Return `config` with only the layers numbered `layers`, in this order. Blocks that predict further tokens stay."""
    settings = [config.layer(i) for i in (*layers, *range(config.n_layer, config.n_blocks))]
    names = dict.fromkeys((*(config.layers or {}), *(["experts"] if config.moe is not None else [])))
    patterns = {name: [getattr(layer, name) for layer in settings] for name in names}
    return replace(config, n_layer=len(layers), layers=patterns or None)
