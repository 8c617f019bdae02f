"""What can be known before a run folder is written: which classes a group can name, and what callbacks would refuse."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, Trainer
from torch.optim import Optimizer

import callbacks


def callback_problems(trainer: Trainer) -> list[str]:
    """What the callbacks would refuse once training starts, when a run folder has been written: one sentence each."""
    found = []
    if trainer.log_every_n_steps < 1:  # type: ignore[attr-defined]
        found.append("trainer.log_every_n_steps must be at least 1 (--trainer.log_every_n_steps)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.Schedule) and trainer.max_steps != -1:  # else the data say how many steps there are
            try:
                callback.resolve(trainer)
            except ValueError as error:
                found.append(str(error))
        if isinstance(callback, callbacks.BatchRamp):
            found += callback.trainer_problems(trainer)
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        found.append("the run has no end: give --trainer.max_steps or --trainer.max_epochs")
    return found


def concrete_subclasses(base: type) -> list[type]:
    """Classes that a group can name: the base and everything below it that is public and not abstract."""
    found, queue = [], [base]
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        abstract = bool(getattr(cls, "__abstractmethods__", None))
        if not abstract and not cls.__name__.startswith("_") and cls not in (LightningDataModule, Optimizer):
            found.append(cls)
    return list(dict.fromkeys(found))
