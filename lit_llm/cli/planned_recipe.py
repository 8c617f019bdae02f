"""A recipe parsed and checked as `fit` does it, for machines that need not be this one: no run folder, no devices, no data
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from lit_llm import callbacks
from lit_llm.cli.arguments import config_files_in
from lit_llm.cli.dataset_size import data_facts
from lit_llm.cli.preflight import layout
from lit_llm.cli.recipe_cli import RecipeCLI
from lit_llm.data.paths import MissingFiles
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.errors import UserError
from lit_llm.models.gpt import GPTConfig
from lit_llm.plan.parameters import ModelShape
from lit_llm.plan.settings import DataFacts, RunSettings, devices_of, from_recipe, layout_from_strategy
from lit_llm.runs.run_folder import default_run_dir

VOCABULARY = 50257
"""GPT-2's, where neither the recipe nor the data say."""


class PlannedCLI(RecipeCLI):
    """The recipe and what the planner takes from it. `notes` says what had to be guessed.

    Args:
        arguments: as `fit` takes them.
        devices: instead of the recipe's trainer.devices and num_nodes.
        devices_per_node: of the hardware planned for.

    Raises:
        UserError: what `fit` would say is wrong, all of it, one sentence a line. Data files that are not on this machine are a
            note instead.
    """

    def __init__(self, arguments: list[str], *, devices: int | None = None, devices_per_node: int = 8) -> None:
        self.planned_devices, self.devices_per_node = devices, devices_per_node
        self.notes: list[str] = []
        self.data_is_here = True
        super().__init__("fit", arguments)

    # -- checking, without the devices ------------------------------------------------------------------------------

    def _choose_start(self) -> None:
        self.run_dir = default_run_dir(config_files_in(self.arguments))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # One CPU stands for all devices: the Trainer's own settings are checked, hardware that is not here is not missed.
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None, "plugins": None}
        return super().instantiate_trainer(**{**here, "logger": False, **kwargs})

    def _layout(self, trainer: Trainer, model: GPTConfig | None) -> tuple[int | None, list[str]]:
        strategy = self.parser.instantiate(Namespace(trainer=self.config.trainer.clone())).trainer.strategy
        if isinstance(strategy, MeshStrategy):
            return layout(strategy, self.devices, model, self.architecture)
        try:
            return layout_from_strategy(self.strategy, self.devices, self.devices_per_node).data_parallel, []
        except UserError as error:
            return None, [str(error)]

    def _data_problems(self, data_parallel_ranks: int) -> list[str]:
        found = super()._data_problems(data_parallel_ranks)
        absent = [problem for problem in found if isinstance(problem, MissingFiles)]
        self.data_is_here = not absent
        self.notes += [f"{problem.rstrip('.')}, so epochs cannot be computed" for problem in absent]
        return [problem for problem in found if not isinstance(problem, MissingFiles)]

    # -- what the planner takes -------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Any:
        """The recipe's trainer.strategy: a name, or a dict of class_path and init_args."""
        strategy = self.config.trainer.strategy
        return strategy.as_dict() if isinstance(strategy, Namespace) else strategy

    @property
    def devices(self) -> int:
        trainer = self.config.trainer
        return self.planned_devices or devices_of(trainer.devices, trainer.num_nodes or 1)

    def settings(self) -> RunSettings:
        """The run in plain numbers.

        Raises:
            UserError: it cannot be planned: a data module without batch sizes, a precision without a known layout.
        """
        data, compute = self.datamodule, self.config_init["compute"]
        if compute.compile or compute.float8:
            self.notes.append(
                "compute.compile and compute.float8 keep less than is planned here: memory is that of eager blocks"
            )
        facts, vocab_size = data_facts(data) if self.data_is_here else (DataFacts(), getattr(data, "_vocab_size", None))
        if self.architecture is not None:
            raise UserError(
                f"only lit_llm's own model can be planned, {self.architecture.class_path} is another "
                "(--architecture; `check` tries it)"
            )
        global_batch = getattr(data, "global_batch_size", None)
        if global_batch is None:
            raise UserError(f"{type(data).__name__} has no global_batch_size: such data cannot be planned (--data)")
        shape, ramp = ModelShape.of(self.model_config(vocab_size)), getattr(data, "ramp", None)
        settings = from_recipe(
            self.config.as_dict(),
            shape,
            devices=self.devices,
            devices_per_node=self.devices_per_node,
            micro_batch=getattr(data, "micro_batch_size", None),
            global_batch=global_batch,
            data=facts,
            ramp=() if ramp is None else tuple((stage.step, stage.size // shape.block_size) for stage in ramp.stages),
        )
        if ramp is not None:
            self.notes.append(
                f"batch_ramp: {settings.tokens:,} tokens in total. Per-step figures describe the final batch; "
                "total time and cost assume its speed throughout"
            )
        if settings.schedule.kind == "Decay":
            self.notes.append("Decay begins where the resumed checkpoint was made: it is planned as if from the first step on")
        return settings

    def model_config(self, vocab_size: int | None) -> GPTConfig:
        """The model with its vocabulary and its length of context settled."""
        model: GPTConfig = self.config_init["model"]
        if model.vocab_size is None and vocab_size is None:
            vocab_size = VOCABULARY
            self.notes.append(f"model.vocab_size is null and the data do not say: GPT-2's {VOCABULARY:,} is taken")
        length = getattr(self.datamodule, "block_size", None) or model.block_size
        if length != model.block_size:
            self.notes.append(f"sequences are data.block_size = {length} long, model.block_size is {model.block_size}")
        return replace(model, vocab_size=model.vocab_size or vocab_size)

    def rate(self) -> Callable[[int], float] | None:
        """The schedule as a function of the step, with a peak of 1; None where there is none or no end, or for Decay, which
        follows a checkpoint.
        """
        schedule: callbacks.Schedule | None = self.config_init.get("schedule")
        if schedule is None or isinstance(schedule, callbacks.Decay) or self.trainer.max_steps == -1:
            return None
        schedule.resolve(self.trainer)
        return lambda step: schedule.rate(step, 1.0)
