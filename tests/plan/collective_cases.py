"""Layouts whose bytes the plan predicts and a dry run of each counts."""

import json
import os
import sys
import traceback
from functools import partial
from typing import Any, NamedTuple

import torch
from dry_run import Batch, Cluster, DryRun
from lightning.pytorch import Callback

from lit_llm.callbacks import GradientNorm
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.plan import Optimizer, PlannedRun, find
from lit_llm.plan.collectives import bytes_of_rank
from lit_llm.plan.memory import resolved
from lit_llm.training.language_model import LanguageModel

SEQUENCES, LENGTH, MICRO_BATCHES, VOCABULARY = 2, 64, 2, 512
MODEL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 64,
    "block_size": LENGTH,
    "vocab_size": VOCABULARY,
}
EXPERTS = {"mlp": "swiglu", "moe": {"experts": 8, "top_k": 2, "expert_width": 96, "shared_experts": 1}}
LATENT = {
    **{"n_kv_head": None, "qk_norm": False},
    "latent": {"kv_rank": 24, "query_rank": 40, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 12},
}
CONVOLUTIONS = {"input_convolution": 6, "qkv_convolution": 4}
AHEAD = {"predict_ahead": 2}
EACH_TIME = {"reshard_after_forward": True, "reduce_each_micro_batch": True}


class Case(NamedTuple):
    """`ranks`: those that are counted; with Muon all, because only their mean is known in advance. `recomputed`: every
    n-th block."""

    world: int
    strategy: dict[str, Any]
    precision: str = "32-true"
    model: dict[str, Any] = {}  # noqa: RUF012
    muon: bool = False
    ranks: tuple[int, ...] = (0,)
    recomputed: int | str = "none"


CASES = {
    "FSDP2, each time, bf16-mixed": Case(4, EACH_TIME, "bf16-mixed"),
    "FSDP2, auto, bf16-mixed": Case(4, {}, "bf16-mixed"),
    "HSDP": Case(4, {"replicate": 2}),
    "tensor parallel": Case(2, {"tensor_parallel": 2}, model={"position": "learned"}, recomputed=2),
    "tensor parallel, bf16-mixed": Case(4, {"tensor_parallel": 4}, "bf16-mixed", {"n_kv_head": 4}),
    "pipeline, tied": Case(2, {"pipeline": 2}, model={"tie_embeddings": True}, ranks=(0, 1)),
    "context, gather": Case(2, {"context": 2}, "bf16-mixed", recomputed=1),
    "context, heads": Case(2, {"context": 2, "context_attention": "heads"}, "bf16-mixed"),
    "Muon": Case(2, {}, muon=True, ranks=(0, 1)),
    "experts, replicas": Case(4, {"replicate": 2, "expert": 2}, model=EXPERTS),
    "experts x tensor": Case(4, {"tensor_parallel": 2, "expert": 2}, "bf16-mixed", EXPERTS),
    "experts x pipeline": Case(4, {"pipeline": 2, "expert": 2}, model=EXPERTS, ranks=(0, 2)),
    "ahead, context x tensor": Case(4, {"context": 2, "tensor_parallel": 2}, model=AHEAD),
    "ahead, pipeline": Case(4, {"pipeline": 2}, model=AHEAD, ranks=(0, 2)),
    "latents, context, heads": Case(2, {"context": 2, "context_attention": "heads"}, model=LATENT),
    "latents, context x tensor": Case(4, {"context": 2, "tensor_parallel": 2}, model=LATENT),
    "convolutions, context, heads x tensor": Case(
        4, {"context": 2, "tensor_parallel": 2, "context_attention": "heads"}, model={**CONVOLUTIONS, "n_kv_head": 4}
    ),
    "convolutions, context x tensor": Case(8, {"context": 4, "tensor_parallel": 2}, model=CONVOLUTIONS),
    "shard x tensor x pipeline": Case(8, {"pipeline": 2, "tensor_parallel": 2}, "bf16-mixed", ranks=(0, 4)),
}


def planned(case: Case) -> list[float]:
    """Bytes that each of the case's ranks sends in a step, by the plan."""
    layout = layout_of(MeshStrategy(**case.strategy), case.world, 8)
    settings = PlannedRun(
        GPTConfig(**{**MODEL, **case.model}),
        Optimizer("MuonAdamW") if case.muon else Optimizer("AdamW", fused=True),
        1,
        SEQUENCES * MICRO_BATCHES * layout.data_parallel,
        SEQUENCES,
        case.precision,
        layout=layout,
        compute=ComputeConfig(activation_checkpointing=case.recomputed),
    )
    settings = resolved(settings, find("a100-80gb"))  # the memory that a dry run assumes
    stages = case.world // layout.pipeline.ranks
    found = [sum(bytes_of_rank(settings, rank // stages, cuda=True).values()) for rank in case.ranks]
    return [sum(found) / len(found)] if case.muon else found


def counted(case: Case) -> list[float]:
    """The same, counted in a step of the real code. Each rank runs in a process of its own, as a dry run must."""
    found = [sum(sent for *_, sent in _dry_run(case, rank)) for rank in case.ranks]
    return [sum(found) / len(found)] if case.muon else found


def _dry_run(case: Case, rank: int) -> list[tuple[str, str, float]]:
    """(dimension, kind, bytes sent)."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            optimizer: Any = MuonAdamW if case.muon else partial(torch.optim.AdamW, fused=True)
            compute = ComputeConfig(activation_checkpointing=case.recomputed)
            model = LanguageModel(GPTConfig(**{**MODEL, **case.model}), optimizer, LossConfig(), compute)
            callbacks: list[Callback] = [GradientNorm(1.0)]
            batch, strategy = Batch(SEQUENCES, LENGTH, MICRO_BATCHES, VOCABULARY), MeshStrategy(**case.strategy)
            run = DryRun(Cluster(1, case.world), batch, model, strategy, case.precision, callbacks, {}, True).rank(rank)
            os.write(writing, json.dumps([(row.dimension, row.kind, row.sent) for row in run.collectives]).encode())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"the dry run of {case} failed"
    return json.loads(text)
