"""Ranges of numeric arguments and fields, declared in their type annotations, and error sentences for values outside.

`check_ranges` refuses values outside their ranges, and values that an argument's Literal does not list.

    def __init__(self, window: Annotated[int, whole(2, 10**6)] = 128) -> None:
        check_ranges(SpikeGuard, locals())

Code that checks or explains settings gets the ranges from these annotations with `ranges_of`. This module imports no torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin

from .errors import UserError, refused

LARGEST = 10**15
"""Largest absolute value of a number if its `Domain` names no other bound."""
STEPS = 10**12
"""Upper bound for settings that are numbers of optimizer steps."""
INT64 = 2**63 - 1
TINY = 2.0**-126
"""The smallest normal number of float32 and bfloat16. Hardware may treat smaller numbers as 0."""

_SMALL = 100
"""If the upper bound of a domain is at most this, a message names both bounds."""


@dataclass(frozen=True)
class Domain:
    """An interval of finite numbers.

    Attributes:
        low, high: the lower and the upper bound.
        above_low, below_high: whether the bound itself is excluded.
        whole: whether only integers are allowed.
        null: whether null (None) is allowed. `ranges_of` sets this: true if the argument's type includes None.
        also: further allowed values, such as -1 for "no end".
        fraction: a float is a share of a whole, above 0 and at most 1; the bounds hold for integers only.
    """

    low: float = -LARGEST
    high: float = LARGEST
    above_low: bool = False
    below_high: bool = False
    whole: bool = False
    null: bool = False
    also: tuple[float, ...] = ()
    fraction: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether a value is in the domain. None is in the domain if `null`; any other value must be a number."""
        if value is None:
            return self.null
        if isinstance(value, bool) or not isinstance(value, Real):  # also numpy's numbers
            return False
        value = cast(float, value)
        if value in self.also:
            return True
        if self.fraction and isinstance(value, float):
            return 0 < value <= 1
        if not _is_finite(value) or (self.whole and not isinstance(value, Integral)):
            return False
        return not self._too_low(value) and not self._too_high(value)

    def problem(self, key: str, value: Any) -> str | None:
        """One sentence with the value, the rule and the flag --`key`; None if the value is in the domain."""
        sentence = self.sentence(key, value)
        return None if sentence is None else f"{sentence} (--{key})"

    def sentence(self, name: str, value: Any) -> str | None:
        """One sentence with the value and the rule; None if the value is in the domain."""
        why = self.why_not(value)
        return None if why is None else f"{name} {why}"

    def why_not(self, value: Any) -> str | None:
        """Value and rule, such as "is 3, but must be at least 5"; None if the value is in the domain."""
        return None if self.accepts(value) else f"is {shown(value)}, but must be {self.rule(value)}"

    def rule(self, value: Any) -> str:
        """The rule that a refused value breaks, as text: the violated bound, or both bounds if the upper is at most 100."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        low = f"{'above' if self.above_low else 'at least'} {_written(self.low)}" if self.low > -LARGEST else ""
        high = f"{'below' if self.below_high else 'at most'} {_written(self.high)}"
        if number and self._too_high(value):
            words = [high] if self.high > _SMALL or not low else [low, high]
        elif number and self._too_low(value):
            words = [low or f"at least {_written(self.low)}"] + ([high] if self.high <= _SMALL else [])
        else:
            kind = "a whole number" if self.whole or self.fraction else "a finite number"
            words = [f"{kind} {'of ' if low.startswith('at') else ''}{low}".rstrip(), *([high] if self.high <= _SMALL else [])]
        rule = " and ".join(words)
        if self.fraction:
            rule += ", or a fraction above 0 and at most 1.0"
        also = [_written(each) for each in self.also] + (["null"] if self.null else [])
        return rule + "".join(f", or {each}" if self.fraction else f" or {each}" for each in also)

    def _too_low(self, value: float) -> bool:
        return value < self.low or (self.above_low and value <= self.low + TINY)

    def _too_high(self, value: float) -> bool:
        return value > self.high or (self.below_high and value == self.high)


def shown(value: Any) -> str:
    """Text of a refused value as YAML writes it, cut after 60 characters."""
    text = _flow(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _flow(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return str(value)


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an integer may be too large for a float


def _written(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}" if math.isfinite(number) else _flow(number)


def whole(low: int, high: int = LARGEST, *, null: bool = False, also: tuple[int, ...] = ()) -> Domain:
    """Return the domain of whole numbers from `low` to `high` (included). It also has the numbers `also`; with `null`, None."""
    return Domain(low, high, whole=True, null=null, also=also)


def at_least(low: float, high: float = LARGEST, *, null: bool = False) -> Domain:
    """Return the domain of numbers from `low` to `high`, both included; with `null`, it also has None."""
    return Domain(low, high, null=null)


def above(low: float, high: float = LARGEST, *, null: bool = False) -> Domain:
    """Return the domain of numbers from `low` (excluded) to `high` (included); with `null`, it also has None."""
    return Domain(low, high, above_low=True, null=null)


def below(low: float, high: float) -> Domain:
    """The domain of numbers from `low` (included) to `high` (excluded)."""
    return Domain(low, high, below_high=True)


@cache
def ranges_of(cls: type) -> dict[str, Domain]:
    """Argument name → range, for each argument of a class or of its base classes whose type has a `Domain` annotation."""
    return {
        name: replace(domain, null=NoneType in get_args(hint.__origin__))
        for name, hint in _hints_of(cls)
        for domain in getattr(hint, "__metadata__", ())
        if isinstance(domain, Domain)
    }


@cache
def _choices_of(cls: type) -> dict[str, list[Any]]:
    """Argument name → allowed values, for each argument whose type is a Literal, or a Literal or None."""
    kinds = {name: get_args(hint) if NoneType in get_args(hint) else (hint,) for name, hint in _hints_of(cls)}
    return {
        name: [*get_args(kind), *([None] if others else [])]
        for name, (kind, *others) in kinds.items()
        if get_origin(kind) is Literal
    }


def _hints_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, type) of each argument of the bases of a class, and then of the class itself."""
    for each in reversed(inspect.getmro(cls)):
        init: Any = vars(each).get("__init__")
        for name, hint in getattr(init, "__annotations__", {}).items():
            with suppress(NameError):  # of a type that is imported for type checkers only
                yield name, eval(hint, init.__globals__) if isinstance(hint, str) else hint


def range_problems(cls: type, group: str, values: Mapping[str, Any]) -> list[str]:
    """One sentence for each argument of a class that is, or is a list with, a number outside the argument's range.

    Args:
        group: the key of the class in a recipe.
        values: arguments by name; other names are ignored.
    """
    return [f"{group}.{name} {why} (--{group}.{name})" for name, why in _outside(cls, values)]


def check_ranges(cls: type, values: Mapping[str, Any]) -> None:
    """Refuse arguments of a class whose numbers are outside their ranges, or whose values their Literals do not list.

    Args:
        values: arguments by name; other names are ignored.

    Raises:
        UserError: One sentence for each refused argument.
    """
    problems = [refused(cls, name, why) for name, why in _outside(cls, values)]
    for name, choices in _choices_of(cls).items():
        if name in values and values[name] not in choices:
            *most, last = ("null" if each is None else str(each) for each in choices)
            problems.append(refused(cls, name, f"is {shown(values[name])}, but must be {', '.join(most)} or {last}"))
    if problems:
        raise UserError("\n".join(problems))


def _outside(cls: type, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name of the argument, its value and rule in words) for each number outside its range."""
    of_class = ranges_of(cls)
    reasons = ((name, of_class[name].why_not(each)) for name in values if name in of_class for each in _each(values[name]))
    return list(dict.fromkeys((name, why) for name, why in reasons if why is not None))


def _each(value: Any) -> Iterator[Any]:
    """Yield a value, or the elements of nested lists, but no strings: a string, such as "auto", has no range."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _each(one)
    elif not isinstance(value, str):
        yield value
