"""Random numbers that depend only on the position in training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ._lightning import data_parallel


class StepSeed(Callback):
    """Seeds all random generators before each micro-batch, so that dropout is the same after a resume.

    The seed is a hash of (`seed`, optimizer steps made, number of the micro-batch in the step, data-parallel rank). So no
    generator state is saved, and random numbers drawn in validation or text generation do not change training. The random
    numbers do change with the number of ranks and the micro-batch size.

    Ranks that share a batch, such as tensor-parallel ranks, draw the same numbers.

    Not covered: generators in loader workers.

    Logs: nothing.

    Contract:
        on_train_batch_start: seeds torch (the CPU and every accelerator), `random` and `numpy.random`.
        State: none.
    Cost: about 20 µs a micro-batch (one CPU core).

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._rank = 0
        self._seed_accelerator: Callable[[int], object] | None = None
        self._step = -1
        self._micro_batch = 0  # counted here, because manual optimization has no fixed window

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rank = data_parallel(trainer)[0]
        device = trainer.strategy.root_device
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._seed_accelerator = getattr(module, "manual_seed_all", module.manual_seed)  # mps is a single device
        self._step = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._micro_batch = self._micro_batch + 1 if step == self._step else 0
        self._step = step
        position = f"{self.seed} {step} {self._micro_batch} {self._rank}"
        # Different bytes for each generator: equal seeds would correlate their streams.
        drawn = hashlib.blake2b(position.encode(), digest_size=20).digest()
        # Not torch.manual_seed: without an accelerator it formats a stack trace, which takes 0.5 ms.
        torch.default_generator.manual_seed(int.from_bytes(drawn[:8], "little"))
        if self._seed_accelerator is not None:
            self._seed_accelerator(int.from_bytes(drawn[:8], "little"))
        random.seed(int.from_bytes(drawn[8:16], "little"))
        np.random.seed(int.from_bytes(drawn[16:], "little"))
