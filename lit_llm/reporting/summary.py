"""The words at the top of a page: which model, which data, what it cost, why it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lit_llm.core.number_text import count, counted, duration, money_range
from lit_llm.plan.compute import cost_usd
from lit_llm.reporting.run_curves import Launch, RunCurves

_SOURCES = ("paths", "path", "train", "val")
"""Settings of data that name files."""


def described(run: RunCurves) -> list[tuple[str, str]]:
    """Sentences by name, of what the run has recorded."""
    found = {
        "model": _model(run),
        "data": _data(run),
        "training": _training(run),
        "planned cost": planned_cost(run.launches),
        "cost": cost(run.launches),
        "end": run.end.ended if run.end else "",
    }
    return [(name, said) for name, said in found.items() if said]


class _Price(NamedTuple):
    """What launches cost, for how long on what, and how many of them recorded a price."""

    usd: str
    spent: str
    launches: int


def planned_cost(launches: Sequence[Launch]) -> str:
    """What the first launch planned for the whole run, like "$1.2 for 37 min on h100-sxm"; "" if unknown."""
    price = _price(launches[:1], "run_seconds")
    return f"{price.usd} {price.spent}" if price is not None and not launches[0].first_step else ""


def cost(launches: Sequence[Launch]) -> str:
    """The price of the time that the launches have trained; "" if none of them knew one."""
    price = _price(launches, "trained_seconds")
    if price is None:
        return ""
    some = f"; {price.launches} of {len(launches)} launches recorded a price" if price.launches < len(launches) else ""
    return f"{price.usd} {price.spent}{some}"


def short_cost(launches: Sequence[Launch]) -> str:
    """The same without time and hardware, like "$0.17 (1 of 2 launches)"; "" if no launch knew a price."""
    price = _price(launches, "trained_seconds")
    if price is None:
        return ""
    return price.usd + (f" ({price.launches} of {len(launches)} launches)" if price.launches < len(launches) else "")


def _price(launches: Sequence[Launch], name: str) -> _Price | None:
    """Of the seconds that launches have recorded by this name; None if no launch has both."""
    low = high = seconds = 0.0
    priced = 0
    for launch in launches:
        spent = {**launch.planned, **launch.measured}.get(name)
        if launch.price is None or not spent:
            continue
        priced += 1
        seconds += spent
        low += cost_usd(spent, launch.devices, launch.price[0])
        high += cost_usd(spent, launch.devices, launch.price[1])
    return _Price(money_range(low, high), f"for {duration(seconds)} on {launches[-1].hardware}", priced) if seconds else None


def _model(run: RunCurves) -> str:
    config = run.run.config
    model = run.launches[-1].model if run.launches else _part(config, "model")
    parts = [str(_part(config, "architecture")["class_path"])] if "class_path" in _part(config, "architecture") else []
    if isinstance(model.get("n_layer"), int):
        layers = counted(model["n_layer"], "layer")
        heads = f"{model.get('n_head')} heads"
        if model.get("n_kv_head") not in (None, model.get("n_head")):
            heads += f" ({model['n_kv_head']} for keys and values)"
        parts.append(f"{layers}, width {model.get('n_embd')}, {heads}, context {model.get('block_size')}")
        if isinstance(model.get("vocab_size"), int):
            parts.append(f"vocabulary {model['vocab_size']:,}")
        parts.append(", ".join(str(model[key]) for key in ("position", "norm", "mlp") if model.get(key)))
    if config.get("init_from"):
        parts.append(f"from the weights of {config['init_from']}")
    if _part(config, "lora"):
        parts.append(f"LoRA of rank {_part(config, 'lora').get('rank')}")
    return "; ".join(part for part in parts if part)


def _data(run: RunCurves) -> str:
    data = _part(run.run.config, "data")
    settings = _part(data, "init_args")
    parts = [_class(data)] if data else []
    for key in _SOURCES:
        if settings.get(key):
            named = settings[key] if isinstance(settings[key], list) else [settings[key]]
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            parts.append(f"{key}: {', '.join(map(str, named[:3]))}{more}")
    if _part(settings, "sources"):
        parts.append(f"sources: {', '.join(map(str, _part(settings, 'sources')))}")
    if _part(settings, "tokenizer"):
        parts.append(f"tokenizer {_class(_part(settings, 'tokenizer'))}")
    tokens, seen = run.last("setup/train_tokens"), run.last("progress/tokens")
    if tokens:
        parts.append(f"{count(tokens)} training tokens" + (f", {seen / tokens:.2g} epochs" if seen else ""))
    return "; ".join(parts)


def _training(run: RunCurves) -> str:
    config = run.run.config
    data = _part(_part(config, "data"), "init_args")
    optimizer, rate = _part(config, "optimizer"), _part(_part(config, "optimizer"), "init_args").get("lr")
    parts = [_class(optimizer) + (f", learning rate {rate:g}" if isinstance(rate, int | float) else "")] if optimizer else []
    if _part(config, "schedule"):
        parts.append(_class(_part(config, "schedule")))
    if isinstance(data.get("global_batch_size"), int):
        parts.append(f"{data['global_batch_size']:,} sequences a step")
    precision = _part(config, "trainer").get("precision") if config else None
    if precision:
        parts.append(str(precision))
    return "; ".join([*parts, *([run.launches[-1].hardware] if run.launches else [])])


def _part(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = settings.get(key)
    return found if isinstance(found, Mapping) else {}


def _class(settings: Mapping[str, Any]) -> str:
    return str(settings.get("class_path", "")).rpartition(".")[2]
