"""The range of a number. It is defined beside the callbacks, which work without lit_llm, and needs no torch."""

# ruff: noqa: F401 - other rooms import these from here

from lit_llm.callbacks.ranges import (
    INT64,
    LARGEST,
    STEPS,
    Domain,
    above,
    at_least,
    below,
    check_ranges,
    range_problems,
    ranges_of,
    shown,
    whole,
)
