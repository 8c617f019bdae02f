"""The range of a number. It is defined beside the callbacks, which work without lit_llm, and needs no torch."""

from lit_llm.callbacks.ranges import *  # noqa: F403  # other rooms import these from here
