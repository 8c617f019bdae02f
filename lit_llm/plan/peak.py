"""The peak memory of a run, and what a device has for it."""

from __future__ import annotations

from lit_llm.plan.hardware import Hardware
from lit_llm.plan.memory import Memory, memory_of_ranks
from lit_llm.plan.reserved import CONTEXT_GB
from lit_llm.plan.settings import RunSettings


def usable_bytes(hardware: Hardware) -> float:
    """Capacity of a device without the context of a GPU's driver. The capacity must be known."""
    assert hardware.memory_gb is not None
    return (hardware.memory_gb - (CONTEXT_GB if hardware.is_gpu else 0)) * 1e9


def peak_memory(settings: RunSettings, *, cuda: bool) -> Memory:
    """Of the rank that needs most."""
    return max(peaks_of_ranks(settings, cuda=cuda), key=lambda memory: memory.needed)


def peaks_of_ranks(settings: RunSettings, *, cuda: bool) -> list[Memory]:
    """`memory_of_ranks` of these settings, in the step that needs most."""
    names = ("length", "precision", "optimizer", "layout", "chunk_size", "z_loss", "checkpointing", "lora", "ema")
    same = {name: getattr(settings, name) for name in names} | {"compiled": settings.compile, "cuda": cuda}
    kinds = (
        memory_of_ranks(settings.model, sequences=sequences, accumulation=accumulation, **same)
        for sequences, accumulation in settings.micro_batches.items()
    )
    return max(kinds, key=lambda ranks: max(rank.needed for rank in ranks))
