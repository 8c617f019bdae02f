"""Techniques of the ladder that change the optimizer, its schedules, the batch, or average weights."""

from __future__ import annotations

from ladder_techniques import Technique
from torch.optim import Optimizer


def momentum_warmup(optimizer: Optimizer, t: float, total: int) -> None:
    """Muon's momentum rises from 0.85 to 0.95 over the first tenth of the steps."""
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.85 + 0.1 * min(1.0, 10 * t / total)


TECHNIQUES = [
    Technique("momentum-warmup", "modded-nanogpt: 0.85 to 0.95", before_step=momentum_warmup),
]
