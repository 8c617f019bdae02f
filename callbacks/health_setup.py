"""Facts about a run that do not change: what the optimizer decays and trains, sizes, and initial weights."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from ._torch import local_part
from .contracts import CountsTokens, HasVocabulary, offered_by_data

SETUP_DESCRIPTIONS = {
    "setup/decayed_vectors": "parameters of one dimension (norm weights, biases) in a parameter group with weight decay",
    "setup/unoptimized": "elements of parameters that require gradients and are in no parameter group",
    "setup/frozen": "elements of parameters that do not require gradients",
    "setup/initial_gain": "before step 1: largest root mean square of a Linear's weights, times the root of its inputs",
    "setup/vocab_size": "rows of the embedding, or the data module's `vocab_size`",
    "setup/train_tokens": "the data module's `train_tokens`",
}


def setup_facts(trainer: Trainer, pl_module: LightningModule, rows: int) -> dict[str, float]:
    """The facts by tag, as `SETUP_DESCRIPTIONS` says. What cannot be known is left out.

    Of sharded parameters the whole counts, but the gain is that of this rank's shards. Of a pipeline, the stage counts.

    Args:
        rows: of the embedding; 0 if there is none.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    owned = {p for group in groups for p in group["params"]}
    decayed = [p for group in groups if group.get("weight_decay") for p in group["params"] if p.ndim == 1]
    facts: dict[str, float] = {
        "setup/decayed_vectors": len(decayed),
        "setup/unoptimized": sum(p.numel() for p in pl_module.parameters() if p.requires_grad and p not in owned),
        "setup/frozen": sum(p.numel() for p in pl_module.parameters() if not p.requires_grad),
    }
    data = offered_by_data(trainer, HasVocabulary)
    if vocabulary := rows or (data and data.vocab_size):
        facts["setup/vocab_size"] = vocabulary
    if text := offered_by_data(trainer, CountsTokens):
        facts["setup/train_tokens"] = text.train_tokens
    if trainer.global_step == 0:
        linears = [module for module in pl_module.modules() if isinstance(module, nn.Linear)]
        gains = [_gain(each) for each in linears if isinstance(getattr(each, "weight", None), Tensor)]  # FSDP1 removes them
        if gains:
            facts["setup/initial_gain"] = torch.stack(gains).max().item()
    return {name: float(value) for name, value in facts.items()}


def _gain(linear: nn.Linear) -> Tensor:
    """0-d: how much the layer enlarges random inputs."""
    weight = local_part(linear.weight.detach())
    square = weight.float().square().mean() if weight.numel() else torch.zeros((), device=weight.device)
    return square.sqrt() * linear.in_features**0.5
