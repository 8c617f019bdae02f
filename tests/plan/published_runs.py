"""The runs of benchmarks/published.yaml as settings of a plan: for tests, and for benchmarks/published_*.py."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_llm.core.yaml_reading import read_yaml_file
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.plan import Hardware, Layout, Optimizer, PlannedRun, find

FILE = Path(__file__).parents[2] / "benchmarks" / "published.yaml"
_BLOCKS: dict[str, dict[str, Any]] = {
    "gpt2": {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False},
    "llama": {"mlp": "swiglu", "qk_norm": False},
    "relu2": {},
    "qwen3": {"mlp": "swiglu"},
    "gpt-oss": {"mlp": "clamped_swiglu", "bias": True, "qk_norm": False, "attention_sinks": True},
}


@dataclass(frozen=True)
class Run:
    """A published run: what it trained where, and what was measured (NaN: only the memory).

    `memory_kind`: "reserved" or "allocated". `sealed`: not looked at until the band of a plan was tuned.
    """

    group: str
    name: str
    source: str
    hardware: Hardware
    settings: PlannedRun
    tokens_per_second: float
    memory_gib: float | None
    memory_kind: str | None
    async_tp: bool
    sealed: bool

    def __str__(self) -> str:
        run = self.settings
        kernels = "float8" if run.compute.float8 else "compiled" if run.compute.compile else "eager"
        return f"{self.group}: {self.name}, {run.layout.devices} x {self.hardware.name}, T {run.sequence_length}, {kernels}"


@functools.cache
def runs(*, memory: bool = False, of: str = "groups") -> tuple[Run, ...]:
    """All runs whose speed counts, or with `memory` all that state it. `of` "mixtures": runs with experts; "unseen"."""
    raw = read_yaml_file(FILE)
    found = [
        _run(raw["models"], {key: value for key, value in group.items() if key != "rows"} | row, group["name"])
        for group in raw[of]
        for row in group["rows"] + (group.get("memory_rows", []) if memory else [])
    ]
    return tuple(run for run in found if run.memory_gib is not None or not memory)


def _run(models: dict[str, dict[str, Any]], row: dict[str, Any], group: str) -> Run:
    shape = dict(models[row["model"]])
    layout = _layout(row["mesh"], row.get("shards", "parameters"), row.get("schedule", "1f1b"))
    micro_batch, accumulation = row["sequences"], row.get("accumulation", 1)
    if "moe" in shape:
        shape["moe"] = MoEConfig(**shape["moe"])
    settings = PlannedRun(
        GPTConfig(**{**_BLOCKS[shape.pop("base")], **shape, "block_size": row["length"]}),
        Optimizer(row["optimizer"], fused=True),
        max_steps=100,
        global_batch_size=micro_batch * accumulation * layout.data_parallel,
        micro_batch_size=micro_batch,
        precision=row["precision"],
        compute=ComputeConfig(
            row.get("checkpointing", "none"),
            compile=row.get("compile", False),
            attention=row.get("attention", "auto"),
            float8=row.get("float8", False),
        ),
        layout=layout,
        loss=LossConfig(chunk_size=8192 if row.get("loss") == "chunked" else None),
        lora=LoRAConfig(row["lora"], targets=row.get("lora_targets")) if "lora" in row else None,
    )
    return Run(
        group,
        row["name"],
        row["source"],
        find(row["hardware"]),
        settings,
        row.get("tokens_per_second", math.nan),
        row.get("memory_gib"),
        row.get("memory_kind"),
        row.get("async_tp", False),
        row.get("sealed", False),
    )


def _layout(mesh: dict[str, int], shards: str, schedule: str) -> Layout:
    sizes = {name: mesh.get(name, 1) for name in ("replicate", "shard", "context", "tensor_parallel", "expert")}
    ranks = mesh.get("pipeline", 1)
    split = shards if sizes["shard"] * sizes["context"] > 1 else "nothing"
    name = "single" if not mesh else "ddp" if split == "nothing" else "zero1" if split == "optimizer" else "mesh"
    in_pipeline = ranks > 1
    pipeline = PipelineLayout(ranks, schedule if in_pipeline else "1f1b")
    return Layout(name, kept=KeptWhole(in_pipeline, in_pipeline), pipeline=pipeline, **sizes)
