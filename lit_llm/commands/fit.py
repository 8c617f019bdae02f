"""`python -m lit_llm fit`: train. With `--dry_run`: one step as ranks of a cluster that need not be here."""

from __future__ import annotations

import argparse
import json
import sys

from lit_llm.commands.launch import launch
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.errors import UserError, report
from lit_llm.core.number_domain import whole


def _own_flags() -> OwnFlags:
    flags = OwnFlags(prog="python -m lit_llm fit")
    add = flags.add_argument
    add("--dry_run", type=bool, help="Run one step without data, devices or other processes, and print what it needs.")
    add("--dry_run_rank", type=int, range=whole(0, 10_000_000), metavar="N", help="The rank to run. Default: one of each kind.")
    add("--json", type=bool, help="Print the figures of a dry run raw, units in their names.")
    return flags


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    flags = _own_flags()
    own, rest = flags.split(words)
    if not own.dry_run:
        for flag, given in {"--dry_run_rank": own.dry_run_rank is not None, "--json": own.json}.items():
            if given:
                raise UserError(f"{flag} belongs to a dry run: add --dry_run, or remove it")
        return launch("fit", rest, _run, own=flags)
    return launch("fit", rest, lambda arguments: _dry_run(own, arguments), own=flags)


def _run(arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe
    from lit_llm.training.fit import fit
    from lit_llm.training.lost_peer import record_collectives
    from lit_llm.training.rank_log import log_to

    built = build(read_recipe("fit", arguments))
    trainer, log_dir = built.trainer, built.run.log_dir
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
        accept_changes=built.config.accept_changes,
    )


def _dry_run(own: argparse.Namespace, arguments: Arguments) -> int:
    from rich.console import Console

    from lit_llm.config.dry_run import rehearse
    from lit_llm.config.dry_run_report import as_dict, render

    found = rehearse(arguments, own.dry_run_rank)
    if own.json:
        print(json.dumps(as_dict(found), indent=2))
    else:
        Console(file=sys.stdout).print(render(found))
    report("\n".join(found.notes), kind="note")
    return 0
