"""`python -m lit_llm test`: the loss on the test set."""

from __future__ import annotations

from lit_llm.commands.launch import evaluate


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return evaluate("test", words)
