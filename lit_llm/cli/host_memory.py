"""Whether training fits into the memory of this machine, estimated without building the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from lit_llm.batch_sizes import micro_batch
from lit_llm.data import Mixture, TextDataModule, TokenDataModule, TokenShards
from lit_llm.device_memory import memory_bytes
from lit_llm.errors import UserError
from lit_llm.models.config import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.plan.memory import memory_per_rank
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.settings import canonical_precision, layout_from_strategy, optimizer_of
from lit_llm.tokenizers import Learned

TOLERANCE = 1.25
"""The peak is an estimate, so a run on a CPU is refused only if it exceeds the memory by this factor."""

PROCESS_BYTES = 200_000_000
"""What Python with torch and Lightning takes at least, in each process on a CPU."""

_STORED = ("weights", "weight average", "optimizer state", "gradients")


def memory_problem(
    config: Namespace,
    model: GPTConfig,
    data: Any,
    trainer: Trainer,
    strategy: Any,
    *,
    sequences: int | None = None,
    lora: LoRAConfig | None = None,
) -> str | None:
    """Why the run cannot be held in memory, in one sentence; None if it can, or if that is unknown.

    Args:
        strategy: the recipe's trainer.strategy: a name, or a dict of class_path and init_args.
        sequences: of a micro-batch; None: as the data module says.
    """
    device = trainer.strategy.root_device
    on_cpu = device.type == "cpu"
    if device.type not in ("cpu", "cuda"):
        return None
    try:
        precision = canonical_precision(config.trainer.precision)
        layout = layout_from_strategy(strategy, trainer.world_size, trainer.num_devices)
    except UserError:
        return None  # a strategy or precision that the planner does not know
    optimizer = optimizer_of(config.optimizer.as_dict())
    if not optimizer.is_known:
        optimizer = Optimizer("SGD")  # which has no state, so that no optimizer is overestimated
    planned = replace(model, vocab_size=model.vocab_size or _vocab_size(data))
    if sequences is None:
        batch, most = (getattr(data, f"{name}_batch_size", None) for name in ("global", "micro"))
        sequences = (batch and micro_batch(batch, most, layout.data_parallel, layout.pipeline)) or most or 1
    memory = memory_per_rank(
        planned,
        sequences=sequences,
        length=getattr(data, "block_size", None),
        precision=precision,
        optimizer=optimizer,
        layout=layout,
        chunk_size=config.loss.chunk_size,
        z_loss=bool(config.loss.z_loss),
        checkpointing=str(config.compute.activation_checkpointing),
        cuda=not on_cpu,
        lora=lora,
        ema=config.ema is not None,
    )
    processes = trainer.num_devices if on_cpu else 1  # the processes on a CPU share its memory
    capacity = memory_bytes(device)
    stored = processes * (sum(memory.parts.get(part, 0) for part in _STORED) + (PROCESS_BYTES if on_cpu else 0))
    peak = processes * memory.total
    has = f"this {'machine' if on_cpu else 'GPU'} has {capacity / 1e9:,.1f} GB"
    share = f" in {processes:,} processes" if processes > 1 else ""
    if stored > capacity:
        flags = "--model.n_layer, --model.n_embd, --model.mlp_width, --model.head_dim, --model.vocab_size or --trainer.devices"
        return f"weights, gradients and optimizer state take {stored / 1e9:,.1f} GB{share}, but {has} (lower {flags})"
    if on_cpu and not config.compute.compile and peak > TOLERANCE * capacity:
        flags = "--data.micro_batch_size, --data.global_batch_size, --data.block_size or a size of the model"
        return f"a training step takes about {peak / 1e9:,.1f} GB{share}, but {has} (lower {flags})"
    return None


def _vocab_size(data: Any) -> int:
    """The number of token ids as far as it is known without reading text; 1 if it is not."""
    if isinstance(data, TokenShards | Mixture):
        return data.known_vocab_size or 1
    if isinstance(data, TextDataModule) and not isinstance(data.source_tokenizer, Learned):
        return data.source_tokenizer.vocab_size
    known = None if isinstance(data, TokenDataModule) else getattr(data, "vocab_size", None)
    return known if isinstance(known, int) and known > 0 else 1
