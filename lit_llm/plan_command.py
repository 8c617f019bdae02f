"""`python -m lit_llm plan`: the budget of a run before it starts, from the recipe that `fit` takes."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from rich.console import Console

import callbacks
from lit_llm.cli import RecipeCLI
from lit_llm.data.facts import data_facts
from lit_llm.launch_checks import mesh_layout
from lit_llm.model import GPTConfig
from lit_llm.plan import ModelShape, Options, RunSettings, as_dict, find, make_plan, sweep
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.report import markdown, render, table_rows
from lit_llm.plan.settings import DataFacts, devices_of, from_recipe
from lit_llm.run_folder import default_run_dir

VOCABULARY = 50257
"""GPT-2's, where neither the recipe nor the data say: a wrong guess moves embedding, head and loss."""


class PlannedCLI(RecipeCLI):
    """The recipe, parsed and checked as `fit` does it, for machines that need not be this one: no run folder, no devices.

    Raises:
        ValueError: what `fit` would say is wrong, all of it, one sentence a line.
    """

    def __init__(self, arguments: list[str], *, devices: int | None, devices_per_node: int) -> None:
        self.planned_devices, self.devices_per_node = devices, devices_per_node
        super().__init__("fit", arguments)

    def _choose_run_dir_and_checkpoint(self) -> None:
        from lit_llm.arguments import config_files_in

        self.run_dir = default_run_dir(config_files_in(self.arguments))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # One CPU stands for all the devices: the Trainer's own settings are checked, hardware that is not here is not missed.
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None, "logger": False}
        return super().instantiate_trainer(**{**here, "plugins": None, **kwargs})

    def _layout(self, trainer: Trainer, model: GPTConfig | None) -> tuple[int | None, list[str]]:
        strategy = self.config.trainer.strategy
        if str(getattr(strategy, "class_path", "")).endswith(".MeshStrategy"):
            built = self.parser.instantiate(Namespace(trainer=self.config.trainer.clone())).trainer.strategy
            return mesh_layout(built, self.devices, model)
        try:
            return self._settings_layout().data_parallel, []
        except ValueError as error:
            return None, [str(error)]

    def _settings_layout(self) -> Any:
        from lit_llm.plan.settings import layout_of

        strategy = self.config.trainer.strategy
        strategy = strategy.as_dict() if isinstance(strategy, Namespace) else strategy
        return layout_of(strategy, self.devices, self.devices_per_node)

    @property
    def devices(self) -> int:
        if self.planned_devices is not None:
            return self.planned_devices
        trainer = self.config.trainer
        return devices_of(trainer.devices, trainer.num_nodes or 1)

    def settings(self) -> tuple[RunSettings, list[str]]:
        """The run as the planner wants it, and notes on what had to be guessed."""
        config, notes = self.config, []
        facts, vocab_size = data_facts(self.datamodule)
        model: GPTConfig = self.config_init["model"]
        if model.vocab_size is None:
            if vocab_size is None:
                vocab_size = VOCABULARY
                notes.append(f"model.vocab_size is null and the data do not say: {VOCABULARY:,} is assumed")
            model = replace(model, vocab_size=vocab_size)
        data = self.datamodule
        batch = getattr(data, "global_batch_size", None)
        if batch is None:
            raise ValueError("the batch size is unknown: only data modules with a global_batch_size can be planned (--data)")
        if self.config.trainer.precision not in (None, *_PLANNED) and str(config.trainer.precision) not in _PLANNED:
            notes.append(f"precision {config.trainer.precision}")
        length = getattr(data, "block_size", None) or model.block_size
        if length < model.block_size:
            notes.append(f"data.block_size {length} is planned as the context (model.block_size is {model.block_size})")
        settings = from_recipe(
            config.as_dict(),
            ModelShape.of(model),
            devices=self.devices,
            devices_per_node=self.devices_per_node,
            micro_batch=getattr(data, "micro_batch_size", None),
            global_batch=batch,
            data=facts,
        )
        return settings, notes

    def rate(self) -> Callable[[int], float] | None:
        """The schedule as a function of the step, with a peak of 1."""
        schedule: callbacks.Schedule | None = self.config_init.get("schedule")
        if schedule is None or self.trainer.max_steps == -1:
            return None
        schedule.resolve(self.trainer)
        return lambda step: schedule.rate(step, 1.0)
