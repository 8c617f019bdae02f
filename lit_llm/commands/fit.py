"""`python -m lit_llm fit`: train."""

from __future__ import annotations

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
