"""The moving average of the weights that a checkpoint holds beside them (`lit_llm.callbacks.EMA`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError

AVERAGE = "ema_state_dict"
"""Key in a checkpoint: the average of the trainable parameters by their names, in fp32.

It equals that of `lit_llm.callbacks.ema`, which needs Lightning.
"""

EMA_HELP = "the average of the weights that the run kept (--ema EMA) instead of the weights"
"""Help of a command's flag --ema."""


def average_problem(content: Mapping[str, Any], checkpoint: Path, flag: str) -> str | None:
    """A sentence if a checkpoint has no average.

    Args:
        flag: which asks for one.
    """
    if AVERAGE in content:
        return None
    return f"{checkpoint} holds no average of the weights: train with --ema EMA, or leave out {flag}"


def averaged(content: Mapping[str, Any], checkpoint: Path, flag: str) -> dict[str, Any]:
    """The state dict of a checkpoint with the average of the weights. Buffers and frozen weights have none.

    Raises:
        UserError: There is no average.
    """
    if problem := average_problem(content, checkpoint, flag):
        raise UserError(problem)
    return {**content["state_dict"], **content[AVERAGE]}
