"""The ids that a prompt starts with, so that it begins as documents began in training."""

from __future__ import annotations

from pathlib import Path

from lit_llm.checkpoint.format import read_values

PROMPT_START = "prompt_start"
"""Key in a checkpoint: a list of ids. Empty: the tokenizer's BOS, if it has one. Missing in imported and old checkpoints."""


def prompt_start(checkpoint: Path) -> list[int]:
    """The ids with which prompts start instead of BOS; empty for BOS, or none without it."""
    return list(read_values(checkpoint).get(PROMPT_START, []))
