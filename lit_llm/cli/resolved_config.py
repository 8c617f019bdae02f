"""A recipe with everything that it leaves to its base, to defaults and to overlays filled in."""

from __future__ import annotations

from typing import Any

import yaml

from lit_llm.cli.parse_errors import leaves
from lit_llm.cli.recipe_cli import RecipeCLI
from lit_llm.errors import UserError
from lit_llm.training.save_config import LAUNCH_ONLY


class _ParsedCLI(RecipeCLI):
    """Parses as `fit` does and builds nothing."""

    def _set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        if self.problems:
            raise UserError("\n".join(self.problems))


def resolved(arguments: list[str]) -> str:
    """The configuration that `fit` would run with, as YAML that runs as it is.

    Raises:
        UserError: what is wrong with the arguments, all of it.
    """
    cli = _ParsedCLI("fit", arguments)
    config = cli.config.clone()
    for key in ("config", "resume", *LAUNCH_ONLY):
        config.pop(key, None)
    text = cli.parser.dump(config, skip_unset=False, skip_validation=True)
    if not cli.initial_problems:
        return text
    # The model is that of weights which are not here: what nobody has set follows from them.
    values = yaml.safe_load(text)
    values["model"] = {key: value for key, value in values["model"].items() if f"model.{key}" in cli.given}
    return yaml.safe_dump(values, sort_keys=False)


def differences(one: str, other: str) -> list[tuple[str, Any, Any]]:
    """Keys (as their flags are called) whose values differ between two resolved configurations; "–" where there is none."""
    a, b = (dict(leaves(yaml.safe_load(text))) for text in (one, other))
    groups = list(dict.fromkeys(key.partition(".")[0] for key in [*a, *b]))
    keys = sorted(dict.fromkeys([*a, *b]), key=lambda key: groups.index(key.partition(".")[0]))
    absent = "–"
    return [(key, a.get(key, absent), b.get(key, absent)) for key in keys if a.get(key, absent) != b.get(key, absent)]
