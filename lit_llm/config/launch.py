"""The entry of every command that takes a recipe: reports mistyped keys first, and imports torch and Lightning only then."""

from __future__ import annotations

import os
from collections.abc import Callable

from lit_llm.config import spelling
from lit_llm.config.arguments import HELP, PRINT_CONFIG, Arguments, read
from lit_llm.config.groups import Command
from lit_llm.config.own_flags import OwnFlags


def launch(command: Command, words: list[str], run: Callable[[Arguments], int], *, own: OwnFlags | None = None) -> int:
    """Run a command with its arguments; returns the exit code.

    `--help [GROUP]` and `--print_config` are answered here.

    Args:
        own: flags of the command that are no keys of a recipe, which its help lists.
        run: takes the arguments. It must raise UserError if `reported` is set, which `build` and `parse` do.
    """
    arguments = read(words)
    if flag := arguments.asks_for(*HELP):
        from lit_llm.config.help import print_help

        print_help(command, flag.value, own)
        return 0
    arguments = spelling.check(command, arguments)
    if arguments.asks_for(PRINT_CONFIG):
        from lit_llm.config.resolved_config import resolved

        print(resolved(arguments), end="")
        return 0
    try:
        code = run(arguments)
    except Exception:
        if os.environ.get("WORLD_SIZE", "1") != "1":  # the import takes seconds
            from lit_llm.training.lost_peer import release_waiting_ranks

            release_waiting_ranks()
        raise
    _leave_process_group()
    return code


def _leave_process_group() -> None:
    """If the interpreter's exit does this, its threads occasionally abort a process."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
