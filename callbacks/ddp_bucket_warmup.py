"""Makes DistributedDataParallel sum gradients in the same order in every step."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from ._torch import prepare_reduction


class DDPBucketWarmup(Callback):
    """Makes DDP use its final gradient buckets from the first step, so that a resumed run rounds like an uninterrupted one.

    In the first step, DDP reduces all gradients in a single bucket. From the second step on, its buckets follow the order in
    which gradients became ready. With three or more ranks, a gradient's place in its bucket determines the order of summation,
    and so the rounding. A backward pass of (0 · every weight) before the first step fixes the buckets.

    Does nothing with other strategies, `find_unused_parameters` or `static_graph`.

    Logs: nothing.

    Contract:
        on_train_start: makes this backward pass, in which DDP reduces gradients once; then clears the gradients.
        State: none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
            return
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        prepare_reduction(ddp)
        # A chain of sums: gradients become ready in reverse order, from the last layer to the first, as in a model.
        nothing = torch.zeros((), device=trainer.strategy.root_device)
        for parameter in parameters:
            nothing = nothing + parameter.flatten()[0] * 0
        nothing.backward()
        for parameter in parameters:
            parameter.grad = None
