"""`python -m lit_llm prepare`: text to token shards."""

from __future__ import annotations

from lit_llm.cli import recipe_cli


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    return recipe_cli.main("prepare", arguments)
