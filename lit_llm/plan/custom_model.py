"""A user's module in the planner: built without memory, its weights and buffers, and what it cannot do."""

from __future__ import annotations

import sys
import traceback
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import lit_llm
from lit_llm.core.errors import UserError
from lit_llm.models.custom import (
    CustomModel,
    architecture_layout_problems,
    attention_checkpointing_problem,
    blocks_problem,
    chunk_problem,
)
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.weights import Key, Weight

if TYPE_CHECKING:
    from lit_llm.plan.settings import RunSettings


def build(config: CustomConfig) -> CustomModel:
    """The module on the meta device; on the CPU if its `__init__` needs values.

    Raises:
        UserError: it cannot be built.
    """
    try:
        return _build(config, "meta")
    except UserError:
        raise
    except Exception:
        pass
    try:
        return _build(config, "cpu")
    except UserError:
        raise
    except Exception as error:  # of the user's code
        path = config.architecture.class_path
        raise UserError(f"architecture {path} cannot be built: {said(error)} (--architecture)") from error


def _build(config: CustomConfig, device: str) -> CustomModel:
    with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
        return CustomModel(config, config.architecture, device)


def weights(config: CustomConfig) -> tuple[Weight, ...]:
    """The parameters, by child of the module. A tied one exists once."""
    return _weights(Key(config))


@lru_cache(maxsize=64)
def _weights(key: Key) -> tuple[Weight, ...]:
    from lit_llm.optim import parameter_groups

    model = build(key.value)
    groups = {id(p): str(group["name"]) for group in parameter_groups(model) for p in group["params"]}
    return tuple(
        Weight(
            name,
            tuple(p.shape),
            ".".join(name.split(".")[:2]),
            groups.get(id(p)),
            times=1 if name.startswith("network.blocks.") else 0,
            own_bytes=p.element_size(),
        )
        for name, p in model.named_parameters()
    )


def problems(settings: RunSettings) -> list[str]:
    """Why a run cannot train its module, one sentence each, as `fit` says them. Not those of a pipeline.

    Raises:
        UserError: the module cannot be built.
    """
    config, layout, checkpointing = settings.model, settings.layout, settings.compute.activation_checkpointing
    assert isinstance(config, CustomConfig)
    path = config.architecture.class_path
    found = architecture_layout_problems(path, layout.tensor_parallel, layout.context)
    if settings.chunk_size is not None:
        found.append(chunk_problem(path, settings.chunk_size))
    if checkpointing != "none" and not has_blocks(config):
        found.append(blocks_problem(path, ["compute.activation_checkpointing"]))
    elif checkpointing == "attention":
        found.append(attention_checkpointing_problem(path))
    return found


def has_blocks(config: CustomConfig) -> bool:
    """Whether the module has `blocks` with parameters."""
    return any(weight.times for weight in weights(config))


def buffer_bytes(config: CustomConfig, parameter_bytes: int) -> int:
    """Bytes of the module's buffers."""
    return _buffer_bytes(Key(config), parameter_bytes)


@lru_cache(maxsize=64)
def _buffer_bytes(key: Key, parameter_bytes: int) -> int:
    buffers = list(build(key.value).buffers())
    narrow = parameter_bytes < 4  # floating-point buffers get the type of the weights
    return sum(b.numel() * (parameter_bytes if narrow and b.is_floating_point() else b.element_size()) for b in buffers)


def said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}{place(error)}"


def place(error: BaseException) -> str:
    """The last line of the user's code in a traceback."""
    others = tuple(str(Path(module.__file__).parent) for module in (torch, lit_llm) if module.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
