"""`python -m lit_llm fit`: train."""

from __future__ import annotations

from lit_llm.cli import recipe_cli


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    return recipe_cli.main("fit", arguments)
