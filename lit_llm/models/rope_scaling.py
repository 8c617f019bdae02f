"""The rules of `GPTConfig.rope_scaling`: which values each rope_type has, and what each value may be. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_llm.core.number_domain import above, at_least, shown

ROPE_SCALING: dict[str, tuple[set[str], set[str]]] = {
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "linear": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "attention_factor", "truncate"},
    ),
    "longrope": ({"original_max_position_embeddings", "short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
"""rope_type → (required keys, optional keys) of `GPTConfig.rope_scaling`."""

_LISTS = ("short_factor", "long_factor")
_FACTOR = above(0, 10**9)
_DOMAINS = {
    "original_max_position_embeddings": above(1, 10**9),  # LongRoPE divides by its logarithm
    "beta_fast": at_least(0.001, 10**6),
    "beta_slow": at_least(0.001, 10**6),
}
"""Key of `rope_scaling` → range of its number. Keys that are missing here are factors, with the range `_FACTOR`."""


def value_problem(key: str, value: Any) -> str | None:
    """Return why `value` is wrong for the key `key` in any model, as text to follow the key; None if some model may have it."""
    if key == "truncate":
        return None if isinstance(value, bool) else f"is {shown(value)}, but must be true or false"
    if key not in _LISTS:
        domain = _DOMAINS.get(key, _FACTOR)
        return None if domain.accepts(value) else f"is {shown(value)}, but must be {domain.rule(value)}"
    if not isinstance(value, list):
        return f"is {shown(value)}, but must be a list of numbers"
    wrong = [each for each in value if not _FACTOR.accepts(each)]
    return f"has {shown(wrong[0])}, but each value must be {_FACTOR.rule(wrong[0])}" if wrong else None


def rope_scaling_problems(scaling: Any, rotated: int, where: str) -> Iterator[str]:
    """Yield one sentence for each reason why the value `scaling` of `rope_scaling` cannot be used.

    Args:
        rotated: number of rotated dimensions of a head.
        where: dotted name of the setting.
    """
    if not isinstance(scaling, dict):
        yield f"{where} is {shown(scaling)}, but must be a dict or null"
        return
    kind = scaling.get("rope_type", "llama3")
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        yield f"{where}.rope_type is {shown(kind)}, but must be one of {', '.join(ROPE_SCALING)}"
        return
    required, optional = ROPE_SCALING[kind]
    values = {key: value for key, value in scaling.items() if key != "rope_type"}
    if not required <= values.keys() <= required | optional:
        given, must, may = (", ".join(sorted(names)) for names in (values, required, optional))
        yield f"{where} has {given or 'no values'}, but {kind} must have {must}{may and f', and may have {may}'}"
        return
    wrong = {key: problem for key, value in values.items() if (problem := value_problem(key, value))}
    yield from (f"{where}.{key} {problem}" for key, problem in wrong.items())
    for key in _LISTS:
        if key in values and key not in wrong and len(values[key]) != rotated // 2:
            yield f"{where}.{key} has {len(values[key])} values, but needs {rotated // 2}, one for each frequency"
    if kind == "llama3" and not wrong and values["low_freq_factor"] >= values["high_freq_factor"]:
        yield (
            f"{where}.high_freq_factor is {values['high_freq_factor']:g}, but must be above low_freq_factor, which is "
            f"{values['low_freq_factor']:g}"
        )
