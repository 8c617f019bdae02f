"""`python -m lit_llm validate`: the loss on held-out text."""

from __future__ import annotations

from lit_llm.commands.launch import evaluate


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return evaluate("validate", words)
