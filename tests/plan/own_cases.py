"""Training steps of `own_architectures`, planned and run: for a test, and for benchmarks/plan_accuracy_own.py."""

from functools import partial
from typing import Any

import torch
from training_step import TrainingStep

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.custom import Architecture
from lit_llm.plan import Optimizer, PlannedRun
from lit_llm.plan.weights import OwnModel

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: class, settings of the run
    "LSTM, dropout": ("LSTM", {}),
    "GRU, a loop over time": ("LoopGRU", {}),
    "short and FFT convolutions with gates (Hyena)": ("Convolutional", {}),
    "attention and convolutions, tied head": ("Hybrid", {}),
    "one block six times (ALBERT), a frozen matrix": ("Shared", {}),
    "encoder and decoder of torch's layers, dropout": ("EncoderDecoder", {}),
    "transformers' GPT-2, dropout": ("GPT2", {}),
    "transformers' LLaMA": ("Llama", {}),
    "LLaMA, bf16-mixed": ("Llama", {"precision": "bf16-mixed"}),
    "hybrid, full checkpointing, two micro-batches": ("Hybrid", {"checkpointing": "full", "accumulation": 2}),
    "a constructor that reads values": ("NeedsData", {}),
}


def settings(name: str, *, sequences: int, length: int, **arguments: Any) -> PlannedRun:
    """A run of one step on one device, with a vocabulary of 1,000."""
    kind, options = CASES.get(name, (name, {}))
    accumulation = options.get("accumulation", 1)
    architecture = Architecture(f"own_architectures.{kind}", arguments)
    return PlannedRun(
        OwnModel(vocab_size=1000, block_size=length, architecture=architecture),
        Optimizer("AdamW", fused=True),
        max_steps=1,
        global_batch_size=sequences * accumulation,
        micro_batch_size=sequences,
        precision=options.get("precision", "32-true"),
        compute=ComputeConfig(options.get("checkpointing", "none")),
    )


def step_of(run: PlannedRun) -> TrainingStep:
    """The same step, to be run."""
    return TrainingStep(
        run.model,
        partial(torch.optim.AdamW, lr=1e-4, fused=True),
        sequences=run.sequences,
        accumulation=run.accumulation,
        precision=run.precision,
        compute=run.compute,
    )
