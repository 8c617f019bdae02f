"""One order of summation for every step under DistributedDataParallel."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from ._torch import prepare_reduction


class DDPBucketWarmup(Callback):
    """Makes DDP reduce its first gradients as it reduces all later ones, so that a resumed run rounds as a straight one.

    DDP reduces its first gradients in a single bucket, and from the second step on in buckets in the order in which the first
    gradients became ready. Where a gradient lies in a bucket decides in which order the contributions of three or more ranks
    are added up, and so how their sum is rounded. The step after a resume would therefore not be that of the straight run.
    Here every weight times zero is differentiated before the first step, and DDP takes its order from that.

    Other strategies, and DDP that searches for unused parameters or assumes a static graph, are left alone.

    Logs: nothing.

    Contract:
        on_train_start: one backward pass without a model, and one reduction; no gradient is left behind.
        State: none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
            return
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        prepare_reduction(ddp)
        # One by one: their gradients become ready in the opposite order, as in a model, from its last layer to its first.
        nothing = torch.zeros((), device=trainer.strategy.root_device)
        for parameter in parameters:
            nothing = nothing + parameter.flatten()[0] * 0
        nothing.backward()
        for parameter in parameters:
            parameter.grad = None
