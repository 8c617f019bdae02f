"""How many processes a launch has, before there is a Trainer."""

from __future__ import annotations

import os

import torch
from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_llm.plan.layout import devices_of


def processes_of(trainer: Namespace) -> int:
    """The processes of a launch: those of torchrun or SLURM, or those that Lightning will start for the recipe's `trainer`."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if SLURMEnvironment.detect():
        return int(os.environ["SLURM_NTASKS"])
    nodes = max(1, trainer.num_nodes or 1)
    if str(trainer.devices) in ("auto", "-1", "None") and trainer.accelerator != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count() * nodes
    return devices_of(trainer.devices, nodes)
