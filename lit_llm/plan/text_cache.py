"""A cache for functions of configurations, which are not hashable: arguments are equal if they are written equally."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
MOST = 1024


class cached_by_text(Generic[P, R]):
    """Keeps the last `MOST` results of a function, by the text of its arguments."""

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._known: dict[str, R] = {}

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        key = repr((args, options))
        if key not in self._known:
            found = self._function(*args, **options)
            if len(self._known) >= MOST:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return self._known[key]

    def cache_clear(self) -> None:
        self._known.clear()
