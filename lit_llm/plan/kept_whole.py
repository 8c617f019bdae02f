"""What FSDP2 keeps whole on the planned hardware, where a setting is auto."""

from __future__ import annotations

from dataclasses import replace

from lit_llm.distributed.keep_rule import keep
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.memory import BYTES
from lit_llm.plan.parameters import gathered_bytes, reduced_bytes, weights_of
from lit_llm.plan.peak import peak_memory, usable_bytes
from lit_llm.plan.settings import RunSettings


def resolved(settings: RunSettings, hardware: Hardware) -> RunSettings:
    """The settings, with the choice on this hardware for what is auto: `keep`'s, or on a GPU the fastest that fits.

    If nothing fits, nothing is kept.
    """
    layout = settings.layout
    if not layout.auto or layout.divisor("parameters") == 1:
        return settings
    memory = (hardware.memory_gb or 0) * 1e9  # unknown: nothing is kept
    weights = weights_of(settings.model, settings.lora, layout.tensor_parallel)
    kept = keep(
        "auto" if "weights" in layout.auto else layout.reshard,
        "auto" if "gradients" in layout.auto else not layout.reduce_once,
        pipeline=layout.pipeline.ranks > 1,
        weight_bytes=sum(gathered_bytes(weights, *BYTES[settings.precision])),
        gradient_bytes=reduced_bytes(weights),
        memory=memory if hardware.is_gpu else memory / layout.devices,  # ranks of a CPU share its memory
    )

    choices = dict.fromkeys(
        (kept.weights and (w or "weights" not in layout.auto), kept.gradients and (g or "gradients" not in layout.auto))
        for w, g in ((True, True), (False, True), (True, False), (False, False))
    )
    tried = [replace(settings, layout=replace(layout, reshard=not w, reduce_once=g, auto=())) for w, g in choices]
    if len(tried) == 1 or not (hardware.is_gpu and memory):
        return tried[0]
    capacity = usable_bytes(hardware)
    return next((each for each in tried if peak_memory(each, cuda=True).needed <= capacity), tried[-1])
