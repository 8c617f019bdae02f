"""A custom architecture as the planner sees it: where a plan has a `GPTConfig`, it has this instead."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lit_llm.models.config import GPTConfig

if TYPE_CHECKING:  # imports torch
    from lit_llm.models.custom import Architecture


@dataclass(kw_only=True)
class CustomConfig(GPTConfig):
    """A user's class. Of the other settings only block_size, vocab_size and eos_id mean something."""

    architecture: Architecture


def custom_config(model: GPTConfig, architecture: Architecture | None) -> GPTConfig:
    """What is planned: `model`, or with an architecture this with what it takes from `model`."""
    if architecture is None:
        return model
    return CustomConfig(**{field.name: getattr(model, field.name) for field in fields(GPTConfig)}, architecture=architecture)
