"""Ranges of numbers: all names of `lit_llm.callbacks.ranges`, which is there because callbacks work without lit_llm."""

from lit_llm.callbacks.ranges import *  # noqa: F403  # other rooms import these from here
