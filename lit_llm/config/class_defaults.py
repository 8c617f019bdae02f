"""The arguments of a class with their defaults, and the defaults of the short name `AdamW`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import Any

from jsonargparse import Namespace

from lit_llm.config.groups import ARCHITECTURE


def own_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """Return {name: parameter} of the `__init__` that the class itself defines, without `**kwargs`; {} if it defines none."""
    init = vars(cls).get("__init__")
    if not inspect.isfunction(init):
        return {}
    parameters = list(inspect.signature(init).parameters.values())[1:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def all_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """Return {name: parameter} of the arguments of a class, with those that its `**kwargs` may pass on to base classes."""
    arguments: dict[str, inspect.Parameter] = {}
    for each in inspect.getmro(cls):
        init = vars(each).get("__init__")
        if not inspect.isfunction(init):
            continue
        arguments = arguments | {name: p for name, p in own_arguments(each).items() if name not in arguments}
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return arguments


def fill_adamw(config: Namespace, given: Collection[str]) -> list[str]:
    """In `config`, set the options of AdamW that are not in `given` to values for language models. Return [a note], or [].

    β and decay are GPT-3's (Brown et al. 2020, appendix B). The rate is 0.003239 − 0.0001395 ln N for N = 12 · layers · width²,
    at most 10^10 (Kaplan et al. 2020, D.1); with trained weights, adapters, rates by width or a user's model, it is torch's.
    """
    model, values = config.model, dict[str, Any](betas=(0.9, 0.95), weight_decay=0.1)
    if all(each is None for each in (config.init_from, config.lora, config.get(ARCHITECTURE), model.base_width)):
        size = min(max(12 * model.n_layer * model.n_embd**2, 1), 1e10)
        values["lr"] = float(f"{0.003239 - 0.0001395 * math.log(size):.3g}")
    arguments, changes = config.optimizer.init_args, []
    for name, value in values.items():
        if f"optimizer.{name}" not in given:
            changes.append(f"{name} {value}{' by the size' if name == 'lr' else ''} (torch: {arguments[name]})")
            arguments[name] = value
    return [f"optimizer AdamW has {', '.join(changes)} (--optimizer torch.optim.AdamW)"] if changes else []
