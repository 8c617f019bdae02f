"""Compute the parameters and training tokens of the compute-optimal model for a budget of FLOPs, and of two other models."""

from __future__ import annotations

import math
from typing import Any

from lit_llm.core.hardware import Hardware
from lit_llm.core.number_text import percent
from lit_llm.plan.compute import TOKENS_PER_PARAMETER, chinchilla_loss, cost_usd
from lit_llm.plan.speed import UNFITTED_MFU, Options


def budget(
    options: Options, hardware: Hardware | None, devices: int, run: tuple[float, float, float | None] | None = None
) -> dict[str, Any] | None:
    """Return a JSON dict: models to train within a budget of `options.flops` FLOPs or of `options.days` days on all devices.

    The dict also has the budget's time and price, if speed and hardware are known. The function returns None if no budget is
    set, or if the budget is in days and the speed of the devices is unknown.
    N parameters and D tokens take C = 6·N·D FLOPs. With D = 20·N, the optimal model has N = √(C / 120). The models of half and
    of twice that size train on twice and on half the tokens, for the same FLOPs.

    Args:
        run: (parameters, tokens, useful FLOP/s or None for unknown) of a run that is listed beside the models, and whose speed
            is used. None: there is no such run, and the speed follows from the MFU.
    """
    speed, said = None if run is None else run[2], "as planned for this run"
    if run is None and hardware is not None and (peak := hardware.peak_tflops["bf16"]) is not None:
        mfu, efficiency = options.mfu or UNFITTED_MFU, options.scaling_efficiency or 1.0
        speed = peak * 1e12 * devices * mfu * efficiency
        said = f"MFU {percent(mfu)}{'' if options.mfu else ' (assumed)'} of {peak:g} TFLOP/s dense"
        said += "" if options.scaling_efficiency is None else f", scaling efficiency {percent(efficiency)}"
    flops = options.flops if options.days is None or speed is None else options.days * 86400 * speed
    if flops is None:
        return None
    best = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    sizes = {name: (n, flops / (6 * n)) for name, n in {"optimal": best, "half": best / 2, "twice": best * 2}.items()}
    sizes |= {} if run is None else {"this run": run[:2]}
    figures = {
        "flops": flops,
        "models": [
            {"name": name, "parameters": n, "tokens": d, "loss": chinchilla_loss(n, d)} for name, (n, d) in sizes.items()
        ],
    }
    if hardware is None or speed is None:
        return figures
    seconds, usd_hour = flops / speed, hardware.usd_hour(options.price_usd_hour)
    hours = seconds * devices / 3600
    return figures | {
        "hardware": f"{devices:,} x {hardware.name}",
        "speed": said,
        "seconds": seconds,
        "device_hours": hours,
        "usd": usd_hour and cost_usd(seconds, devices, usd_hour),
        "price": "the table's assumed range" if options.price_usd_hour is None else "the given price",
        "watts": hardware.watts,
        "mwh": hardware.watts and hours * hardware.watts / 1e6,
    }
