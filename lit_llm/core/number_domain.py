"""Ranges of numbers: exports all names of `lit_llm.callbacks.ranges`. Callbacks, which import no lit_llm, use them too."""

from lit_llm.callbacks.ranges import *  # noqa: F403  # other rooms import these from here
