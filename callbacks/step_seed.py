"""Random draws that depend on the position in training only."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np  # torchmetrics needs it too
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ._lightning import data_parallel


class StepSeed(Callback):
    """Seeds every generator anew for each micro-batch, from its position: dropout is then the same after a resume.

    The seed is a hash of (`seed`, optimizer steps made, number of the micro-batch in the step, data-parallel rank), so
    there is no generator state to save, and what validation or generated text draws in between changes nothing.
    Tensor-parallel ranks work on one batch and draw alike, unless the strategy has an attribute `random_rank`, which is then
    taken for the rank: where each of them has other tokens or heads of the batch, they must draw differently. On another
    number of ranks, or with micro-batches of another size, the draws are others.

    Not covered: what loader workers draw, which have generators of their own.

    Logs: nothing.

    Contract:
        on_train_batch_start: seeds torch (the CPU and every accelerator), `random` and `numpy.random`.
        State: none.
    Costs about 20 µs a micro-batch (one CPU core).

    Args:
        seed: another one gives another run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._rank = 0
        self._seed_accelerator: Callable[[int], object] | None = None
        self._step = -1
        self._micro_batch = 0  # counted, so that it is right for manual optimization too, which has no fixed window

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rank = getattr(trainer.strategy, "random_rank", data_parallel(trainer)[0])
        device = trainer.strategy.root_device
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._seed_accelerator = getattr(module, "manual_seed_all", module.manual_seed)  # mps is always one
        self._step = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._micro_batch = self._micro_batch + 1 if step == self._step else 0
        self._step = step
        position = f"{self.seed} {step} {self._micro_batch} {self._rank}"
        # One hash for each generator: the same number in all would tie their streams together.
        drawn = hashlib.blake2b(position.encode(), digest_size=20).digest()
        # Not torch.manual_seed: without an accelerator it takes half a millisecond, to format a stack trace.
        torch.default_generator.manual_seed(int.from_bytes(drawn[:8], "little"))
        if self._seed_accelerator is not None:
            self._seed_accelerator(int.from_bytes(drawn[:8], "little"))
        random.seed(int.from_bytes(drawn[8:16], "little"))
        np.random.seed(int.from_bytes(drawn[16:], "little"))
