"""`python -m lit_llm fit`: train."""

from __future__ import annotations

from lit_llm.commands.launch import launch
from lit_llm.config.arguments import Arguments


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("fit", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.parse import parse
    from lit_llm.runs.run_folder import expanded
    from lit_llm.training.fit import fit
    from lit_llm.training.lost_peer import record_collectives
    from lit_llm.training.rank_log import log_to

    built = build(parse("fit", arguments))
    trainer, config = built.trainer, built.config
    log_dir = None if config.log_dir is None else expanded(config.log_dir, key="log_dir", flag="--log_dir DIR")
    if log_dir is not None:
        log_to(log_dir, trainer.global_rank, trainer.world_size)
    if trainer.world_size > 1 and trainer.strategy.root_device.type == "cuda":
        record_collectives(log_dir or built.run_dir)
    return fit(
        trainer,
        built.model,
        built.datamodule,
        built.start,
        built.run_dir,
        initial=built.initial,
        replace=config.replace,
        accept_changes=config.accept_changes,
        hang_timeout=config.hang_timeout,
        log_dir=log_dir,
    )
