"""Balances the loads of a mixture's experts without an auxiliary loss."""

from __future__ import annotations

from typing import Annotated

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ._lightning import is_logged, write_row
from ._torch import gathered
from .contracts import CountsExperts, KnowsNorm, KnowsSkip, SplitsLayers, offered
from .errors import UserError, without
from .ranges import at_least, check_ranges


class ExpertBalance(Callback):
    """Moves the bias that a router adds to each expert's score, towards equal loads (Wang et al. 2024, arXiv 2408.15664).

    Once in an optimizer step, where expert i of a layer has bias b_i and has computed c_i tokens of the *global* batch:

        b_i ← b_i + rate · sign(mean(c) − c_i)

    So the biases do not depend on accumulation, ranks or recomputation. A skipped step moves no bias. Skipped are the steps
    that `SpikeGuard` skips, and steps whose norm in `GradientNorm` is not finite, because a loss scaler skips these.

    Logs for the global batch of each logged step:
        `experts/load`: tokens of the busiest expert divided by the mean tokens of an expert, in the least balanced layer.
        `experts/dead`: number of experts, in all layers, without a token.
        `experts/bias`: largest distance of an expert's bias from the mean bias of its layer.
        `experts/NAME`: mean over layers of each value in the module's `router_means`. `LanguageModel` has two, which are means
            over tokens: `entropy` of the router's probabilities, in nats, and `z`, logsumexp(logits)², which grows with the
            logits.

    Contract:
        Needs a module with `expert_counts` and `expert_biases` (`contracts.py`).
        on_fit_start: refuses a module without experts.
        on_before_optimizer_step: moves the biases on the device. The host reads values at logged steps only. List this
            callback after `GradientNorm` and `SpikeGuard`, which decide whether a step is skipped.
        State: none. The biases are buffers of the module.
    Cost: three small kernels a layer.

    Args:
        rate: change of a bias per step, compared with scores of at most 1; 0 = only log.

    Raises:
        UserError: the rate is out of range; the module has no experts.
    """

    def __init__(self, rate: Annotated[float, at_least(0, 1)] = 1e-3) -> None:
        check_ranges(ExpertBalance, locals())
        self.rate = rate

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not getattr(pl_module, "expert_biases", None):
            raise UserError(
                f"ExpertBalance moves the biases of experts, but {type(pl_module).__name__} has none: {without(ExpertBalance)}."
            )

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        module = offered(pl_module, CountsExperts)
        if module is None:
            return
        counts, biases = module.expert_counts.double(), module.expert_biases  # (L, E)
        mean = counts.mean(dim=1, keepdim=True)
        moves = self.rate * (mean - counts).sign()
        skipped = _skipped(trainer)
        if skipped is not None:
            moves = moves.where(~skipped.to(moves.device), 0)
        own = [(bias, move) for bias, move in zip(biases, moves, strict=True) if bias is not None]
        for bias, move in own:
            bias.add_(move)
        step = trainer.global_step + 1
        if is_logged(trainer, step):
            load = (counts / mean.clamp(min=1e-9)).amax()
            apart = ((bias - bias.mean()).double().abs().amax() for bias, _ in own)
            largest = torch.stack([counts.new_zeros(()), *apart]).amax()
            if offered(trainer.strategy, SplitsLayers) is not None:  # other ranks have other layers
                largest = largest.new_tensor(max(gathered(float(largest))))
            values = {"experts/load": load, "experts/dead": (counts == 0).sum().double(), "experts/bias": largest}
            of_routers: dict[str, Tensor] = getattr(pl_module, "router_means", {})
            values |= {f"experts/{name}": of_layers.double().mean() for name, of_layers in of_routers.items()}
            write_row(trainer, dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)), step)


def _skipped(trainer: Trainer) -> Tensor | None:
    """0-d bool tensor: `SpikeGuard` skips this step, or `GradientNorm`'s norm is not finite. None: no callback knows."""
    skips: list[Tensor] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (guard := offered(callback, KnowsSkip)) is not None and guard.latest_skip is not None:
            skips.append(guard.latest_skip > 0)
        if (norm := offered(callback, KnowsNorm)) is not None and norm.latest_norm is not None:
            skips.append(~norm.latest_norm.isfinite())
    return torch.stack([each.reshape(()).to(skips[0].device) for each in skips]).any() if skips else None
