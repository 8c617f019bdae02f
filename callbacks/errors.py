"""The exception for a user's mistake, and how messages name a setting: as an argument of a class, or as a flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

FlagOf = Callable[[type, str | None], str | None]
_flag_of: FlagOf = lambda owner, argument: None  # noqa: E731


class UserError(ValueError):
    """A mistake in the user's input. Each line of the message is one sentence: the value, the rule, and the flag to change.

    A callback raises this error for an invalid argument, or for a conflicting setting of the Trainer or the module.
    `python -m lit_llm` prints the message without a traceback and exits with code 2. Any other exception is a bug and keeps
    its traceback.
    """


@contextmanager
def flags(flag_of: FlagOf) -> Iterator[None]:
    """Context manager in which `setting` and `without` name settings by their flags on a command line.

    Args:
        flag_of: (class, argument) → flag; argument None asks for the flag of the class itself. Returns None without a flag.
    """
    global _flag_of
    before, _flag_of = _flag_of, flag_of
    try:
        yield
    finally:
        _flag_of = before


def setting(owner: type, argument: str | None = None) -> str:
    """The name of an argument (None: of the class) in messages: its flag `--schedule.total_steps`, or `WSD(total_steps)`."""
    return _flag_of(owner, argument) or (f"{owner.__name__}({argument})" if argument else owner.__name__)


def without(callback: type) -> str:
    """The words of a message that tell the user to leave out a callback: "use --ema null" if it has a flag, or "remove EMA"."""
    flag = _flag_of(callback, None)
    return f"remove {callback.__name__}" if flag is None else f"use {flag} null"


def refused(owner: type, argument: str, why: str) -> str:
    """The sentence that refuses the value of an argument.

    Args:
        why: the value and the rule, such as "is 3, but must be at least 5".
    """
    flag = _flag_of(owner, argument)
    return f"{owner.__name__}({argument}) {why}" if flag is None else f"{flag.lstrip('-')} {why} ({flag})"
