"""Sentences at the top of a run's page: model, data, training, compression, cost, and why the run ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lit_llm.core.number_text import count, counted, duration, money_range
from lit_llm.ingest.source import public_name
from lit_llm.plan.compute import cost_usd
from lit_llm.reporting.run_curves import Launch, RunCurves

_SOURCES = ("paths", "path", "train", "val")
"""Keys of data settings whose values are paths of files."""


def described(run: RunCurves) -> list[tuple[str, str]]:
    """Return (name, sentence) pairs about the run's model, data, training, compression, costs and end, if recorded."""
    sentences = {
        "model": _model(run),
        "data": _data(run),
        "training": _training(run),
        "compression": _compression(run),
        "planned cost": planned_cost(run.launches),
        "cost": cost(run.launches),
        "end": run.end["ended"] if run.end else "",
    }
    return [(name, said) for name, said in sentences.items() if said]


def planned_cost(launches: Sequence[Launch]) -> str:
    """Return the cost that the first launch planned for the whole run, like "$1.2 for 37 min on h100-sxm"; "" if unknown."""
    usd, spent, _ = _price(launches[:1], "run_seconds")
    return f"{usd} {spent}" if usd and not launches[0]["first_step"] else ""


def cost(launches: Sequence[Launch]) -> str:
    """Return the cost of the launches' training time, like "$1.2 for 37 min on h100-sxm"; "" if no launch recorded a price."""
    usd, spent, priced = _price(launches, "trained_seconds")
    some = f"; {priced} of {len(launches)} launches recorded a price" if priced < len(launches) else ""
    return f"{usd} {spent}{some}" if usd else ""


def short_cost(launches: Sequence[Launch]) -> str:
    """Return the cost of the launches without time and hardware, like "$0.17 (1 of 2 launches)"; "" without a price."""
    usd, _, priced = _price(launches, "trained_seconds")
    return usd + f" ({priced} of {len(launches)} launches)" if usd and priced < len(launches) else usd


def _price(launches: Sequence[Launch], name: str) -> tuple[str, str, int]:
    """Return (text of the price, text of time and hardware, number of launches with a price).

    `name`: key of the launches' seconds in plan.json. Both texts are "" if no launch has both seconds and a price.
    """
    spent = [({**launch["predicted"], **launch["measured"]}.get(name), launch) for launch in launches]
    priced = [(seconds, launch) for seconds, launch in spent if seconds and launch["price_usd_hour"] is not None]
    if not priced:
        return "", "", 0
    costs = [cost_usd(seconds, launch["devices"], launch["price_usd_hour"]) for seconds, launch in priced]
    low, high = map(sum, zip(*costs, strict=True))
    return money_range(low, high), f"for {duration(sum(s for s, _ in priced))} on {_hardware(launches[-1:])}", len(priced)


def _hardware(launches: Sequence[Launch]) -> str:
    """Return the devices of the last launch, like "8 x h100-sxm"; "" if there is no launch."""
    for last in launches[-1:]:
        return ("" if last["devices"] == 1 else f"{last['devices']} x ") + str(last["hardware"]["name"])
    return ""


def _model(run: RunCurves) -> str:
    setting = run.run.setting
    model = run.launches[-1]["settings"].get("model") if run.launches else setting("model")
    model = model if isinstance(model, Mapping) else {}
    parts = [str(setting("architecture.class_path") or "")]
    sizes = []
    if isinstance(model.get("n_layer"), int):
        layers = counted(model["n_layer"], "layer")
        heads = f"{model.get('n_head')} heads"
        if model.get("n_kv_head") not in (None, model.get("n_head")):
            heads += f" ({model['n_kv_head']} for keys and values)"
        sizes = [layers, f"width {model.get('n_embd')}", heads]
    if isinstance(model.get("block_size"), int):
        sizes.append(f"context {model['block_size']}")
    parts.append(", ".join(sizes))
    if isinstance(model.get("vocab_size"), int):
        parts.append(f"vocabulary {model['vocab_size']:,}")
    if isinstance(model.get("n_layer"), int):
        parts.append(", ".join(str(model[key]) for key in ("position", "norm", "mlp") if model.get(key)))
    if setting("init_from"):
        parts.append(f"from the weights of {setting('init_from')}")
    if setting("lora"):
        parts.append(f"LoRA of rank {setting('lora.rank')}")
    return "; ".join(part for part in parts if part)


def _data(run: RunCurves) -> str:
    setting = run.run.setting
    parts = [_class(setting("data.class_path"))]
    for key in _SOURCES:
        if named := setting(f"data.init_args.{key}"):
            named = named if isinstance(named, list) else [named]
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            parts.append(f"{key}: {', '.join(public_name(str(each)) for each in named[:3])}{more}")
    if isinstance(sources := setting("data.init_args.sources"), Mapping | list):
        parts.append(f"sources: {', '.join(map(str, sources))}")
    if tokenizer := setting("data.init_args.tokenizer.class_path"):
        parts.append(f"tokenizer {_class(tokenizer)}")
    tokens, seen = run.last("setup/train_tokens"), run.last("progress/tokens")
    if tokens:
        parts.append(f"{count(tokens)} training tokens" + (f", {seen / tokens:.2g} epochs" if seen else ""))
    return "; ".join(part for part in parts if part)


def _training(run: RunCurves) -> str:
    setting, rate = run.run.setting, run.run.setting("optimizer.init_args.lr")
    optimizer = _class(setting("optimizer.class_path"))
    parts = [f"{optimizer}, learning rate {rate:g}" if isinstance(rate, int | float) else optimizer]
    parts.append(_class(setting("schedule.class_path")))
    if isinstance(batch := setting("data.init_args.global_batch_size"), int):
        parts.append(f"{batch:,} sequences a step")
    parts += [str(setting("trainer.precision") or ""), _hardware(run.launches)]
    return "; ".join(part for part in parts if part)


def _compression(run: RunCurves) -> str:
    """Return a sentence with the last validation loss in bits per byte and per token, and the bits per byte of gzip and xz."""
    loss, bits = run.last("val/loss"), run.last("val/bits_per_byte")
    if loss is None or bits is None:
        return "" if loss is None else "bits per byte are not known: no tokenizer, or a loss that is not nats per token"
    known = {name: run.last(f"val/{name}_bits_per_byte") for name in ("gzip", "xz")}
    said = " and ".join(f"{name} {value:.3f}" for name, value in known.items() if value is not None)
    others = "gzip and xz are not compared (`validate` says why)"
    if said:
        others = f"{said} bits per byte of the same text, or of a sample above 2^18 tokens"
    return f"{bits:.3f} bits per byte, {loss / math.log(2):.3f} bits per token; {others}"


def _class(path: object) -> str:
    return str(path or "").rpartition(".")[2]
