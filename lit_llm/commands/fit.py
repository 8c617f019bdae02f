"""`python -m lit_llm fit`: train; `validate` and `test`: the loss of a checkpoint on held-out text, or on the test set."""

from __future__ import annotations

from typing import Literal

from lit_llm.commands.launch import launch
from lit_llm.config.arguments import Arguments


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("fit", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.api import fit
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe

    return fit(build(read_recipe("fit", arguments)))


def validate(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("validate", words, lambda arguments: _evaluate("validate", arguments))


def test(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("test", words, lambda arguments: _evaluate("test", arguments))


def _evaluate(command: Literal["validate", "test"], arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe
    from lit_llm.core.errors import UserError
    from lit_llm.training.fit import print_metrics, restore_problem

    built = build(read_recipe(command, arguments))
    saved = built.run.start.saved
    assert saved is not None
    run = built.trainer.validate if command == "validate" else built.trainer.test
    try:
        run(built.model, datamodule=built.datamodule, ckpt_path=saved.path, verbose=False, weights_only=True)
    except Exception as error:
        if problem := restore_problem(saved.path, error):
            raise UserError(f"{problem} (--ckpt_path)") from error
        raise
    print_metrics(built.trainer, "val" if command == "validate" else "test", built.run.run_dir, saved.step)
    return 0
