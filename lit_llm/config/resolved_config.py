"""A recipe with every setting that its base, its overlays and the defaults fill in."""

from __future__ import annotations

from typing import Any

from lit_llm.config.arguments import Arguments, leaves
from lit_llm.config.groups import LAUNCH_ONLY
from lit_llm.config.resolve import read_recipe
from lit_llm.core.yaml_reading import dump_yaml, read_yaml


def resolved(arguments: Arguments | list[str]) -> str:
    """The configuration that `fit` would use, as YAML that runs as it is.

    Raises:
        UserError: Everything that is wrong with the arguments.
    """
    recipe = read_recipe("fit", arguments)
    recipe.raise_problems()
    text = recipe.as_yaml(without=("resume", *LAUNCH_ONLY))
    if not recipe.initial_problems:
        return text
    # The model follows from weights that are not on this machine. Only what the recipe sets is known.
    values = read_yaml(text)
    values["model"] = {key: value for key, value in values["model"].items() if f"model.{key}" in recipe.given}
    return dump_yaml(values)


def differences(one: str, other: str) -> list[tuple[str, Any, Any]]:
    """Keys (as their flags are called) whose values differ between two resolved configurations; "–" where there is none."""
    a, b = (dict(leaves(read_yaml(text))) for text in (one, other))
    groups = list(dict.fromkeys(key.partition(".")[0] for key in [*a, *b]))
    keys = sorted(dict.fromkeys([*a, *b]), key=lambda key: groups.index(key.partition(".")[0]))
    absent = "–"
    return [(key, a.get(key, absent), b.get(key, absent)) for key in keys if a.get(key, absent) != b.get(key, absent)]
