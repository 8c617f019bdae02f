"""Writes numbers as text with few digits and with units."""

from __future__ import annotations

import math


def two_digits(number: float, *, whole: bool = False) -> str:
    """The number with two significant digits and without an exponent, for example "0.016", "2.0", "97,000".

    Args:
        whole: leave out decimals, for example "2" instead of "2.0".
    """
    if not number:
        return "0"
    for _ in range(2):  # 9.96 becomes 10.0, then 10
        decimals = 1 - math.floor(math.log10(abs(number)))
        number = round(number, decimals)
    return f"{number:,.{0 if whole else max(0, decimals)}f}"


def money(usd: float) -> str:
    """US dollars with two digits, for example "$0.75", "$8,900", "$130k", "$1.2M"."""
    if usd < 0.01:
        return "less than $0.01"
    for limit, factor, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if usd >= limit * 0.995:
            return f"${two_digits(usd / factor)}{unit}"
    return f"${two_digits(usd)}"


def money_range(low: float, high: float) -> str:
    """A range of US dollars, for example "$130k to $320k"; one amount if both amounts have the same text."""
    return money(low) if money(low) == money(high) else f"{money(low)} to {money(high)}"


def percent(share: float) -> str:
    """A share as a percentage with two digits, for example "0.16%", "97%"."""
    return f"{two_digits(100 * share)}%"


def counted(number: int, name: str) -> str:
    """A number with a noun, in the plural unless the number is 1, for example "1 run", "1,200 runs"."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def count(number: float) -> str:
    """A number with three digits and a unit, for example "1.56 B", "124 M", "17 k"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:  # 999,700 is 1 M, not 1e+03 k
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """A number of bytes as text in GB (1e9 bytes) and GiB, or in MB below 0.1 GB: "1.50 GB (1.40 GiB)", "12.0 MB"."""
    if number < 1e8:
        return f"{number / 1e6:.1f} MB"
    return f"{number / 1e9:,.2f} GB ({number / 2**30:,.2f} GiB)"


_UNITS = ((1e-3, 1e-6, "µs"), (1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h"))
"""(upper limit in seconds, seconds of a unit, name of the unit): a time below the limit is written in this unit."""


def duration(seconds: float) -> str:
    """A time in seconds as two digits and a readable unit, for example "250 ms", "3.7 days"."""
    if seconds <= 0:
        return "0 s"
    factor, unit = next(((factor, unit) for limit, factor, unit in _UNITS if seconds < limit), (86400, "days"))
    return f"{two_digits(seconds / factor)} {unit}"
