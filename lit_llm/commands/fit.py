"""`python -m lit_llm fit`: train."""

from __future__ import annotations

from lit_llm.cli.arguments import Arguments
from lit_llm.cli.launch import launch


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("fit", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.cli.build import build
    from lit_llm.cli.parse import parse
    from lit_llm.training.fit import fit

    built = build(parse("fit", arguments))
    return fit(
        built.trainer,
        built.model,
        built.datamodule,
        built.start,
        built.run_dir,
        initial=built.initial,
        replace=built.config.replace,
        accept_changes=built.config.accept_changes,
    )
