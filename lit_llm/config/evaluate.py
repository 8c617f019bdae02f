"""The loss of a checkpoint on held-out text: what `validate` and `test` do."""

from __future__ import annotations

from typing import Literal

from lit_llm.config.arguments import Arguments
from lit_llm.config.launch import launch


def evaluate(command: Literal["validate", "test"], words: list[str]) -> int:
    """Entry point of both commands; returns the exit code."""
    return launch(command, words, lambda arguments: _run(command, arguments))


def _run(command: Literal["validate", "test"], arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.parse import parse
    from lit_llm.runs.resume import steps_made
    from lit_llm.training.fit import print_metrics

    built = build(parse(command, arguments))
    checkpoint = built.start.checkpoint
    assert checkpoint is not None
    run = built.trainer.validate if command == "validate" else built.trainer.test
    run(built.model, datamodule=built.datamodule, ckpt_path=checkpoint, verbose=False, weights_only=True)
    print_metrics(built.trainer, "val" if command == "validate" else "test", built.run_dir, steps_made(checkpoint))
    return 0
