"""Work with the model between two training steps that leaves no trace in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn


@contextmanager
def evaluation_mode(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Eval mode, no gradients, and the autocast context of validation. Afterwards random state and modes are as before.

    FSDP2 leaves some weights gathered after a forward pass without a backward pass. They are sharded again.
    """
    modes = [(module, module.training) for module in pl_module.modules()]
    try:
        pl_module.eval()
        with isolate_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
            yield
    finally:
        for module, training in modes:  # per module: some may have been in eval mode before
            module.training = training
        reshard(pl_module)


def reshard(module: nn.Module) -> None:
    """Free the whole weights that FSDP2 keeps after a forward pass without a backward pass.

    A module whose FSDP2 modules are not its submodules, such as the stages of a pipeline, has a method `reshard`, too.
    """
    for unit in module.modules():
        free = getattr(unit, "reshard", None)
        if callable(free):
            free()
