"""A group whose class was changed begins with that class's own defaults.

jsonargparse carries every argument that two classes share from one to the other. Of what somebody has set, that is what an
overlay wants; of what was only a default of the class that is gone, it is a setting nobody made: `--optimizer AdamW` would
train with the learning rate of Muon.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pydoc import locate
from typing import Any

from jsonargparse import Namespace


def restore(config: Namespace, before: Namespace, groups: Iterable[str], given: set[str]) -> None:
    """Put the chosen class's own default wherever nobody has set anything; in place.

    Args:
        config: parsed.
        before: the parser's defaults.
        groups: keys with a class_path and init_args.
        given: dotted keys that a recipe or a flag sets, without init_args.
    """
    for group in groups:
        chosen, default = config.get(group), before.get(group)
        if not isinstance(chosen, Namespace):
            continue
        if isinstance(default, Namespace) and default.class_path == chosen.class_path:
            own = vars(default.get("init_args", Namespace()))
        else:
            own = _defaults(locate(chosen.class_path))
        for name, value in vars(chosen.get("init_args", Namespace())).items():
            # A class as a value (a tokenizer) is more than a default of the class that holds it.
            if name in own and not isinstance(value, Namespace) and not _is_given(f"{group}.{name}", given):
                chosen.init_args[name] = own[name]


def _is_given(key: str, given: set[str]) -> bool:
    return key in given or any(each.startswith(f"{key}.") for each in given)


def _defaults(cls: Any) -> dict[str, Any]:
    """By argument, those that **kwargs hand on to base classes included; arguments without a default are left out."""
    found: dict[str, Any] = {}
    for each in inspect.getmro(cls) if inspect.isclass(cls) else []:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        found = {p.name: p.default for p in parameters if p.default is not p.empty} | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found
