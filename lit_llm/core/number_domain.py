"""Ranges of numbers: exports all names of `lit_llm.callbacks.ranges`, which is in callbacks because these work alone."""

from lit_llm.callbacks.ranges import *  # noqa: F403  # other rooms import these from here
