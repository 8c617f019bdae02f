"""`python -m lit_llm fit`: train; `validate` and `test`: the loss of a checkpoint on held-out text, or on the test set."""

from __future__ import annotations

from typing import Literal

from lit_llm.commands.launch import launch
from lit_llm.config.arguments import Arguments


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("fit", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe
    from lit_llm.training.fit import fit
    from lit_llm.training.lost_peer import record_collectives
    from lit_llm.training.output_streams import log_to

    built = build(read_recipe("fit", arguments))
    trainer, run, log_dir = built.trainer, built.run, built.run.log_dir
    if log_dir is not None:
        log_to(log_dir, trainer.global_rank, trainer.world_size)
    if trainer.world_size > 1 and trainer.strategy.root_device.type == "cuda":
        record_collectives(log_dir or run.run_dir)
    return fit(
        trainer,
        built.model,
        built.datamodule,
        run.start,
        run.run_dir,
        initial=run.initial,
        accept_changes=run.config.accept_changes,
    )


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
