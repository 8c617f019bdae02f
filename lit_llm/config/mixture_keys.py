"""The nested settings of `data: Mixture`, which the parser sets only in a dict that exists."""

from __future__ import annotations

from lit_llm.config.arguments import leaves
from lit_llm.core.yaml_reading import read_yaml


def with_empty_sources(words: list[str]) -> list[str]:
    """Insert `--data.sources={}` before the first flag `--data.sources.KEY`, unless an earlier word sets such a key."""
    first = next((i for i, word in enumerate(words) if word.startswith("--data.sources.")), None)
    if first is None:
        return words
    for word in words[:first]:
        flag, _, value = word.partition("=")
        content = read_yaml(value) if flag == "--config" else None
        keys = [flag[2:]] if content is None else [key for key, _ in leaves(content)]
        if any(f"{key}.".startswith("data.sources.") for key in keys):
            return words
    return [*words[:first], "--data.sources={}", *words[first:]]
