"""Whether training fits into the memory of this machine, estimated without building the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.config.objects import RunObjects
from lit_llm.core.errors import UserError
from lit_llm.core.hardware import this_machine
from lit_llm.core.memory import address_space_bytes, memory_bytes
from lit_llm.data import Mixture, TextDataModule, TokenDataModule, TokenShards
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.plan.memory import Memory, peaks_of_ranks, resolved
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.weights import OwnModel, planned_model
from lit_llm.tokenizers import Learned

TOLERANCE = 1.25
"""A run on a CPU is refused only if its estimated peak is more than TOLERANCE times the machine's memory."""

PROCESS_BYTES = 200_000_000
"""The least bytes of memory that Python with torch and Lightning takes in each process on a CPU."""

_STORED = ("weights", "weight average", "optimizer state", "gradients")


def memory_problem(objects: RunObjects) -> str | None:
    """Return one sentence that says why a run of `fit` does not fit into memory. None: the run fits, or this is unknown.

    On a GPU, this function also decides whether FSDP2 keeps gathered weights and unreduced gradients, where the recipe says
    auto (`MeshStrategy.chosen`). A trial run (`RunSpec.scratch`) is estimated with the smallest possible batch, because `check`
    reduces the batch.
    """
    spec, trainer = objects.spec, objects.trainer
    device = trainer.strategy.root_device
    if device.type not in ("cpu", "cuda"):
        return None
    try:
        settings = _settings(objects, spec.config.trainer.precision, cut=spec.scratch)
        settings = resolved(settings, this_machine(measure=False, device=device))
        ranks = peaks_of_ranks(settings, cuda=device.type == "cuda")
    except UserError:
        return None  # a strategy or precision that the planner does not know
    except Exception as error:  # a bug of the planner must not end a run
        rank_zero_warn(f"plan: whether the run fits into memory is not known: {type(error).__name__}: {error}")
        return None
    if device.type == "cuda" and isinstance(trainer.strategy, MeshStrategy) and not settings.layout.auto:  # decided
        trainer.strategy.chosen = settings.layout.kept
    return _problem(ranks, trainer, settings)


def _settings(objects: RunObjects, precision: str, *, cut: bool) -> PlannedRun:
    model, data, optimizer, layout = objects.spec.model, objects.datamodule, objects.optimizer, objects.layout
    assert model is not None and optimizer is not None and layout is not None
    planned = planned_model(replace(model, vocab_size=model.vocab_size or _vocab_size(data)), objects.architecture)
    steps = max(1, objects.trainer.max_steps)  # memory does not depend on it
    settings = PlannedRun.of(objects.parts, planned, optimizer, layout, precision, steps)
    if not settings.optimizer.is_known:
        settings = replace(settings, optimizer=Optimizer("SGD"))  # no state, so that no optimizer is overestimated
    if cut:
        settings = replace(settings, micro_batch_size=1, ramp=())
    if cut or getattr(data, "global_batch_size", None) is None:
        least = (settings.micro_batch_size or 1) * layout.data_parallel * layout.pipeline.stages
        settings = replace(settings, global_batch_size=least)
    return settings


def _problem(ranks: list[Memory], trainer: Trainer, settings: PlannedRun) -> str | None:
    """Return a sentence that says why the run does not fit, given each pipeline rank's peak memory; None if the run fits."""
    device = trainer.strategy.root_device
    on_cpu, capacity = device.type == "cpu", float(memory_bytes(device))
    processes = trainer.num_devices if on_cpu else 1  # the processes on a CPU share its memory
    limited = processes * address_space_bytes() if on_cpu else math.inf
    capacity = min(capacity, limited)

    def together(sizes: list[int]) -> float:
        return processes * sum(sizes) / len(sizes) if on_cpu else max(sizes)

    stored = together([sum(rank.parts.get(part, 0) for part in _STORED) + (PROCESS_BYTES if on_cpu else 0) for rank in ranks])
    peak = together([rank.total for rank in ranks])
    has = f"this {'machine' if on_cpu else 'GPU'} has {capacity / 1e9:,.1f} GB"
    if capacity == limited:
        has = f"a process may map {capacity / processes / 1e9:,.1f} GB (ulimit -v)"
    share = f" in {processes:,} processes" if processes > 1 else ""
    if stored > capacity:
        sizes = "--model.n_layer, --model.n_embd, --model.mlp_width, --model.head_dim, --model.vocab_size"
        flags = f"{'--architecture' if isinstance(settings.model, OwnModel) else sizes} or --trainer.devices"
        return f"weights, gradients and optimizer state take {stored / 1e9:,.1f} GB{share}, but {has} (lower {flags})"
    if on_cpu and not settings.compute.compile and peak > TOLERANCE * capacity:
        flags = "--data.micro_batch_size, --data.global_batch_size, --data.block_size or a size of the model"
        return f"a training step takes about {peak / 1e9:,.1f} GB{share}, but {has} (lower {flags})"
    return None


def _vocab_size(data: Any) -> int:
    """Return the vocabulary size of the data if it is known without reading text; otherwise 1."""
    if isinstance(data, TokenShards | Mixture):
        return data.known_vocab_size or 1
    if isinstance(data, TextDataModule) and not isinstance(data.source_tokenizer, Learned):
        return data.source_tokenizer.vocab_size
    known = None if isinstance(data, TokenDataModule) else getattr(data, "vocab_size", None)
    return known if isinstance(known, int) and known > 0 else 1
