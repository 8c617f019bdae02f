"""The command line of fit, validate, test and prepare: from arguments to a model, data and a Trainer; no training logic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch.optim import Optimizer

import lit_llm.data
import lit_llm.optim
from lit_llm import callbacks
from lit_llm.checkpoint.format import verify
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.cli.arguments import config_files_in, expand_run, with_bases
from lit_llm.cli.class_defaults import restore
from lit_llm.cli.filter_warnings import filter_warnings
from lit_llm.cli.groups import CALLBACKS, TRAINER, Command, RecipeParser, add_arguments, known_classes
from lit_llm.cli.parse_errors import assignments_in, explain, reason
from lit_llm.cli.preflight import (
    callback_problems,
    device_problems,
    devices_problem,
    layout,
    optimizer_problems,
    trainer_problem,
)
from lit_llm.data.prepare import prepare
from lit_llm.distributed.loss_scaling import loss_scaling
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.errors import UserError
from lit_llm.models.custom import Architecture, class_problem
from lit_llm.models.gpt import GPTConfig
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.initial_weights import InitialWeights
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_evaluation, start_of_fit, steps_made
from lit_llm.training.fit import fit, print_metrics
from lit_llm.training.language_model import LanguageModel, class_name
from lit_llm.training.save_config import SaveRunFolder


class RecipeCLI(LightningCLI):
    """Turns a recipe into a model, data and a Trainer; `run` does what the command says.

    Raises:
        UserError: anything that is wrong with the input, all of it, one sentence a line.
    """

    def __init__(self, command: Command, arguments: list[str]) -> None:
        self.command = command
        self.arguments = expand_run(arguments)
        to_parse = with_bases(self.arguments)
        self.problems: list[str] = []
        self.initial: InitialWeights | None = None
        self.initial_problems: list[str] = []
        if command == "fit":
            try:
                self.initial = InitialWeights.named_in(to_parse)
            except ValueError as error:
                self.initial_problems = str(error).splitlines()
        super().__init__(
            save_config_callback=SaveRunFolder if command == "fit" else None,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={**TRAINER},
            seed_everything_default=1337,
            parser_class=RecipeParser,
            args=to_parse,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # -- parsing ----------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog=f"python -m lit_llm {self.command}", exit_on_error=False, **kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_arguments(parser, self.command)
        if self.initial is not None:
            parser.set_defaults(self.initial.defaults())

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if "--help" in args or "-h" in args:
            parser.parse_args(args)
        try:
            self.config = parser.parse_args(args)
        except Exception as error:
            self.problems, accepted = explain(args, parser.parse_args, known_classes, class_problem)
            if not self.problems:
                raise UserError(reason(str(error))) from None
            if any(problem.startswith("config file") for problem in self.problems):
                raise UserError("\n".join(self.problems)) from None  # what else is missing may stand in there
            # Go on with what was fine, so that a wrong key and a batch that does not divide are told together.
            self.config = parser.parse_args(accepted)
        self.given = given = {assignment.key.replace(".init_args", "") for assignment in assignments_in(args)[0]}
        restore(self.config, parser.get_defaults(), ("optimizer", "data", *CALLBACKS), given)

    # -- building ---------------------------------------------------------------------------------------------------

    def _set_seed(self) -> None:
        filter_warnings()
        super()._set_seed()

    def instantiate_classes(self) -> None:
        """Build everything that is cheap, gather every problem, and only then go on."""
        config = self.config
        problems = self.problems
        self.start = RunStart()
        try:
            self._choose_start()
        except ValueError as error:
            problems += str(error).splitlines()
        if self.initial_problems and self.start.checkpoint is None:  # what model it is depends on them
            raise UserError("\n".join([*problems, *self.initial_problems]))
        built: dict[str, Any] = {}
        for group in ("model", "loss", "compute", "data", *CALLBACKS):
            try:
                built[group] = self.parser.instantiate(Namespace({group: config[group]})).get(group)
            except ValueError as error:
                problems.append(reason(str(error)))
        self.config_init = Namespace(built)
        self.datamodule = built.get("data")
        if (
            not isinstance(self.datamodule, lit_llm.data.TokenDataModule)
            and "trainer.use_distributed_sampler" not in self.given
        ):
            config.trainer.use_distributed_sampler = True  # only ours know which rank reads what
        model_config: GPTConfig | None = built.get("model")
        if model_config is not None:
            problems += model_config.problems()
            problems += self._share_block_size(model_config)
        for group in ("loss", "compute"):
            if built.get(group) is not None:
                problems += built[group].problems()
        self.architecture = Architecture.of(config.get("architecture"))
        if self.architecture is not None and None not in (model_config, built.get("loss"), built.get("compute")):
            assert model_config is not None
            problems += self.architecture.problems(model_config, built["loss"].chunk_size, built["compute"])
        self.follower: CurveFollower | None = None
        if self.command == "fit" and self.config.check_against is not None:
            try:
                self.follower = CurveFollower.named(
                    self.config.check_against, config_files_in(self.arguments), self.config.check_tolerance
                )
            except ValueError as error:
                problems.append(str(error))
        trainer = None
        if self.command != "prepare":
            problems += self._optimizer_problems()
            if problem := devices_problem(self.config.trainer.devices):
                problems.append(problem)
            else:
                trainer = self._trainer_or_problem(problems)
        if trainer is not None and self.command == "fit":
            problems += callback_problems(trainer)
        if isinstance(self.datamodule, lit_llm.data.TokenDataModule) and self.command == "fit":
            chosen = [built.get("batch_ramp")] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
            self.datamodule.find_ramp(chosen)
        data_parallel_ranks: int | None = 1
        if trainer is not None:
            data_parallel_ranks, layout_problems = self._layout(trainer, model_config)
            problems += layout_problems
        if hasattr(self.datamodule, "problems") and data_parallel_ranks is not None:
            problems += self._data_problems(data_parallel_ranks)
        if self.start.checkpoint is not None:
            accepted = self.command == "fit" and self.config.accept_changes
            optimizer_class = None if self._optimizer is None else class_name(self._optimizer)
            problems += self.start.changes(model_config, self.architecture, optimizer_class, self.datamodule, accepted=accepted)
            self.initial = None
        rank = getattr(rank_zero_only, "rank", 0)
        if self.initial is not None:
            if model_config is not None:
                problems += self.initial.model_problems(model_config, self.architecture)
            if rank == 0 and (damage := verify(self.initial.checkpoint)):
                problems.append(f"{damage} (--init_from)")
        if problems:
            raise UserError("\n".join(problems))
        if trainer is not None:
            assert model_config is not None
            self.trainer = trainer
            init_from = None if self.initial is None else self.initial.checkpoint
            self.model = LanguageModel(
                model_config, self._optimizer_factory, built["loss"], built["compute"], init_from, self.architecture
            )

    def _trainer_or_problem(self, problems: list[str]) -> Trainer | None:
        try:
            return self.instantiate_trainer()
        except (MisconfigurationException, ValueError, TypeError) as error:
            if isinstance(error, TypeError) and "CPUAccelerator" not in str(error):
                raise  # a bug; of Lightning's own only a number of devices is told so
            problems.append(trainer_problem(str(error), self.config.trainer))
            return None

    def _layout(self, trainer: Trainer, model: GPTConfig | None) -> tuple[int | None, list[str]]:
        """Data-parallel ranks (None: cannot be said), and what model, strategy and devices cannot do together."""
        ranks, problems = layout(trainer.strategy, trainer.world_size, model, self.architecture)
        problems += optimizer_problems(trainer.strategy, self.config.optimizer.class_path)
        return ranks, problems + device_problems(trainer, self.config_init.get("compute"))

    def _data_problems(self, data_parallel_ranks: int) -> list[str]:
        return self.datamodule.problems(data_parallel_ranks)

    def _share_block_size(self, model: GPTConfig) -> list[str]:
        data = self.datamodule
        if not hasattr(data, "block_size"):
            return []
        if data.block_size is None:
            data.block_size = model.block_size
        if data.block_size > model.block_size:
            return [
                f"data.block_size={data.block_size} is longer than model.block_size={model.block_size} "
                "(--data.block_size, or leave it null to follow the model)"
            ]
        return []

    def _optimizer_factory(self, groups: Iterable[dict[str, Any]]) -> Optimizer:
        return instantiate_class((groups,), self.config.optimizer.as_dict())

    def _optimizer_problems(self) -> list[str]:
        matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
        self._optimizer: Optimizer | None = None
        try:
            self._optimizer = self._optimizer_factory(
                [{"params": [matrix], "name": "matrix"}, {"params": [vector], "name": "vector"}]
            )
        except (ValueError, TypeError, RuntimeError) as error:
            said = str(error).rstrip(".")
            flag = "" if "(--" in said else " (--optimizer)"
            return [f"optimizer {self.config.optimizer.class_path} cannot be built: {said}{flag}"]
        return []

    def _choose_start(self) -> None:
        """Set `run_dir` and `start`, and what follows from them in the configuration.

        Raises:
            UserError: the checkpoint does not exist or is damaged, or a run would be overwritten.
        """
        config = self.config
        resume = config.resume if self.command == "fit" else "never"
        self.run_dir = choose_run_dir(config.run_dir, resume, config_files_in(self.arguments))
        config.run_dir = str(self.run_dir)
        if self.command in ("validate", "test"):
            self.start = start_of_evaluation(self.run_dir, config.ckpt_path)
        elif self.command == "fit":
            self.start = start_of_fit(self.run_dir, resume, replace=config.replace, additional_steps=config.additional_steps)
            config.resume = self.start.resume
            if self.start.max_steps is not None:
                config.trainer.max_steps = self.start.max_steps

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config.trainer.clone()
        config = self.parser.instantiate(Namespace(trainer=config)).trainer
        groups = [self.config_init.get(group) for group in CALLBACKS]
        chosen = [callback for callback in groups if callback is not None]
        if config.enable_progress_bar is False:
            chosen = [callback for callback in chosen if not isinstance(callback, callbacks.TrainingProgress)]
        if self.command != "fit":
            config.logger = False  # evaluating a run must not write into its curves
            chosen = [c for c in chosen if isinstance(c, callbacks.TrainingProgress)]
        elif config.logger in (None, True):
            # What an interrupted run wrote beyond the checkpoint is hidden: the curves go on from the resumed step. If it was
            # killed before its first checkpoint, that is all of them.
            purge_step = 0 if self.start.step is None else self.start.step + 1
            config.logger = TensorBoardLogger(save_dir=self.run_dir, name="", version="", purge_step=purge_step)
        if self.command == "fit":
            chosen += [callbacks.StepSeed(int(self.config.seed_everything)), callbacks.DDPBucketWarmup()]
        if not any(isinstance(callback, Checkpoint) for callback in [*chosen, *(config.callbacks or [])]):
            config.enable_checkpointing = False  # Lightning would add a checkpoint callback of its own
        # Lightning's own requeue saves between two micro-batches; StopOnSignal does it right. In a job, torchrun comes first.
        if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
            config.plugins = [*(config.plugins or []), SLURMEnvironment(auto_requeue=False)]
        if isinstance(config.strategy, FSDPStrategy) or config.strategy in ("fsdp", "fsdp_cpu_offload"):
            config.strategy = MeshStrategy.from_fsdp1(config.strategy, int(config.num_nodes))
        on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not torch.accelerator.is_available())
        if config.precision == "16-mixed" and (on_cpu or isinstance(config.strategy, MeshStrategy)):
            device = "cpu" if on_cpu else torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
            config.plugins = [*(config.plugins or []), loss_scaling(device)]
            config.precision = None  # said by the plugin
        config.default_root_dir = str(self.run_dir)
        trainer = self._instantiate_trainer({**config.as_dict(), **kwargs}, chosen)
        if self.follower is not None:
            trainer.loggers = [*trainer.loggers, self.follower]
        if isinstance(trainer.strategy, MeshStrategy):
            trainer.strategy.sharded_checkpoints |= self.config.sharded_checkpoints
        elif self.config.sharded_checkpoints and self.command == "fit":
            rank_zero_warn(
                "sharded_checkpoints changes nothing here: only MeshStrategy gives ranks parts to write (strategy/fsdp2)."
            )
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not one the user chose
            in_background = self.command == "fit" and self.config.async_checkpoints
            io = AsyncFolderCheckpointIO if in_background else FolderCheckpointIO
            trainer.strategy.checkpoint_io = io(verified=self.start.checkpoint)
        return trainer

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Do what the command says; fit, validate and test end with a table. Returns the exit code."""
        if self.command == "fit":
            return fit(
                self.trainer,
                self.model,
                self.datamodule,
                self.start,
                self.run_dir,
                initial=self.initial,
                replace=self.config.replace,
                accept_changes=self.config.accept_changes,
            )
        if self.command == "prepare":
            if self.config.out is None:
                raise UserError("prepare needs to know where to write (--out DIR)")
            summary = prepare(self.datamodule, Path(self.config.out), shard_tokens=self.config.shard_tokens)
            for name, split in summary["splits"].items():
                print(f"{name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens")
            out = summary["out"]
            print(
                f"train on it: python -m lit_llm fit --config RECIPE --data TokenShards --data.vocab_size "
                f"{summary['vocab_size']} --data.train '{out}/train_*.bin' --data.val '{out}/val_*.bin' "
                f"--data.tokenizer TokenizerJSON --data.tokenizer.path {out}/tokenizer.json"
            )
        else:
            evaluate = self.trainer.validate if self.command == "validate" else self.trainer.test
            evaluate(self.model, datamodule=self.datamodule, ckpt_path=self.start.checkpoint, verbose=False, weights_only=True)
            assert self.start.checkpoint is not None
            steps = steps_made(self.start.checkpoint)
            print_metrics(self.trainer, "val" if self.command == "validate" else "test", self.run_dir, steps)
        return 0


def main(command: Command, arguments: list[str]) -> int:
    """Entry point of fit, validate, test and prepare; returns the exit code."""
    code = RecipeCLI(command, arguments).run()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # left to the interpreter's end, its threads abort a process now and then
    return code
