"""`python -m lit_llm validate`: the loss on held-out text."""

from __future__ import annotations

from lit_llm.cli import recipe_cli


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    return recipe_cli.main("validate", arguments)
