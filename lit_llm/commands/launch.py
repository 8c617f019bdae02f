"""Starts every command that takes a recipe: reports mistyped keys first, and imports torch and Lightning only then."""

from __future__ import annotations

from collections.abc import Callable

from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config import spelling
from lit_llm.config.arguments import HELP, PRINT_CONFIG, Arguments, read
from lit_llm.config.groups import Command
from lit_llm.core.ranks import may_have_peers


def launch(command: Command, words: list[str], run: Callable[[Arguments], int], *, own: OwnFlags | None = None) -> int:
    """Parse the arguments of a command, call `run` with them, and return the exit code.

    For the flags `--help [GROUP]` and `--print_config`, this function prints the help or the settings instead.

    Args:
        own: the command's flags that are not keys of a recipe. The help lists these flags, a mistyped key may mean one of
            them, and problems of these flags are reported together with problems of the recipe.
        run: does the work, and returns the exit code.
    """
    try:
        return _launch(command, words, run, own)
    except Exception as error:
        if may_have_peers():  # the import takes seconds
            from lit_llm.training.meeting import tell_failure

            tell_failure(error)
        raise


def _launch(command: Command, words: list[str], run: Callable[[Arguments], int], own: OwnFlags | None) -> int:
    arguments = read(words)
    program, flags = (own.prog, own.described()) if own else (f"python -m lit_llm {command}", {})
    if flag := arguments.asks_for(*HELP):
        from lit_llm.config.help import print_help

        print_help(command, flag.value, program, flags)
        return 0
    arguments = spelling.check(command, arguments, flags, own.problems if own else [])
    if arguments.asks_for(PRINT_CONFIG):
        from lit_llm.config.resolve import resolved

        print(resolved(arguments), end="")
        return 0
    code = run(arguments)
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # at the interpreter's exit, the group's threads occasionally abort a process
    return code
