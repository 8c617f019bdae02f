"""The command line of fit, validate, test and prepare: named groups, defaults, and no training logic.

Each group of a recipe is one key: what an overlay or a flag should be able to change alone is a group of its own, because
lists (such as trainer.callbacks) are replaced as a whole, dicts are merged key by key.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, instantiate_class
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

import callbacks
import lit_llm.data
import lit_llm.optimizers
from lit_llm.checkpoint.atomic_io import AtomicCheckpointIO
from lit_llm.config_errors import explain, reason
from lit_llm.model import GPTConfig
from lit_llm.module import LanguageModel, LossConfig
from lit_llm.prepare import prepare
from lit_llm.run_folder import CONFIG, default_run_dir, existing_checkpoint, find_checkpoint, resume_checkpoint, set_aside

Command = Literal["fit", "validate", "test", "prepare"]

# Group → base class, default. A group that is null is left out of the run; samples need a prompt, so they start as null.
CALLBACKS: dict[str, tuple[type[Callback], dict[str, Any] | None]] = {
    "schedule": (callbacks.Schedule, {"class_path": "callbacks.Cosine"}),
    "gradient_norm": (callbacks.GradientNorm, {"class_path": "callbacks.GradientNorm"}),
    "validation": (callbacks.ValidateEvery, {"class_path": "callbacks.ValidateEvery", "init_args": {"every_n_steps": 1000}}),
    "throughput": (callbacks.Throughput, {"class_path": "callbacks.Throughput"}),
    "samples": (callbacks.TextSamples, None),
    "page": (callbacks.TensorBoardPage, {"class_path": "callbacks.TensorBoardPage"}),
    "progress": (callbacks.TrainingProgress, {"class_path": "callbacks.TrainingProgress"}),
    "checkpoint": (callbacks.StepCheckpoint, {"class_path": "callbacks.StepCheckpoint"}),
}


class RecipeParser(LightningArgumentParser):
    """Raises instead of exiting, so that all mistakes can be gathered."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(message) from ex


class SaveRunFolder(SaveConfigCallback):
    """Writes what a run folder needs to stand alone: config.yaml (re-runs as is) and the tokenizer."""

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        run_dir = Path(trainer.default_root_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        for key in ("resume", "replace"):  # how this launch began is not part of what the run is
            config.pop(key, None)
        text = self.parser.dump(config, skip_none=False, skip_check=True)
        partial = run_dir / f".{CONFIG}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, run_dir / CONFIG)
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is not None:
            tokenizer.save(run_dir)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", f"```yaml\n{text}\n```", trainer.global_step)

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is about to be trained on what."""
        assert isinstance(pl_module, LanguageModel) and pl_module.model is not None
        data = trainer.datamodule  # type: ignore[attr-defined]
        print(f"model: {pl_module.model.num_parameters():,} parameters, vocabulary {pl_module.config.vocab_size:,}")
        if isinstance(data, lit_llm.data.TokenDataModule):
            assert data.block_size is not None
            step_tokens = data.global_batch_size * data.block_size
            print(
                f"data: {data.train_tokens:,} tokens to train on, {data.val_tokens:,} held out\n"
                f"step: {data.global_batch_size} sequences of {data.block_size} = {step_tokens:,} tokens, in "
                f"{trainer.accumulate_grad_batches} micro-batch(es) on each of {trainer.world_size} process(es)\n"
                f"run: {trainer.max_steps:,} steps = {trainer.max_steps * step_tokens:,} tokens = "
                f"{trainer.max_steps * step_tokens / data.train_tokens:.2f} epochs, into {trainer.default_root_dir}"
            )


class RecipeCLI(LightningCLI):
    """Turns a recipe into a model, data and a Trainer; `run` does what the command says.

    Raises:
        ValueError: anything that is wrong with the input, all of it, one sentence a line.
    """

    def __init__(self, command: Command, arguments: list[str]) -> None:
        self.command = command
        self.arguments = expand_run(arguments)
        self.problems: list[str] = []
        super().__init__(
            save_config_callback=SaveRunFolder if command == "fit" else None,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={
                "max_epochs": -1,
                "log_every_n_steps": 10,
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,  # the order of samples is global; a sampler put on top would reshuffle it
                "enable_model_summary": False,
            },
            seed_everything_default=1337,
            parser_class=RecipeParser,
            args=self.arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # -- parsing ----------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog=f"python -m lit_llm {self.command}", exit_on_error=False, **kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Where the run is kept. Null: runs/<name of the recipe>."
        )
        if self.command == "fit":
            parser.add_argument(
                "--resume",
                type=str,
                default="never",
                help="auto: continue the run folder from its last checkpoint, or start it; PATH: continue from there; "
                "never: start, and refuse a folder that holds a run.",
            )
            parser.add_argument(
                "--replace", type=bool, default=False, help="Rename an existing run folder to <name>.1 and start anew."
            )
        elif self.command == "prepare":
            parser.add_argument("--out", type=str | None, default=None, help="Empty or new folder for the shards.")
            parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="Tokens in a shard at most.")
        else:
            parser.add_argument("--ckpt_path", type=str, default="last", help="last, best, or a checkpoint file.")
        parser.add_class_arguments(GPTConfig, "model")
        parser.add_class_arguments(LossConfig, "loss")
        parser.add_subclass_arguments(
            (Optimizer,), "optimizer", instantiate=False, fail_untyped=False, skip={"params"}, required=True
        )
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=True)
        for group, (base, _) in CALLBACKS.items():
            parser.add_lightning_class_args(base, group, subclass_mode=True, required=False)
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({"trainer." + key: value for key, value in self.trainer_defaults.items()})
        parser.set_defaults(
            {
                "optimizer": {"class_path": "lit_llm.optimizers.MuonAdamW"},
                "data": {"class_path": "lit_llm.data.PythonStdlib"},
                **{group: default for group, (_, default) in CALLBACKS.items()},
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if "--help" in args or "-h" in args:
            parser.parse_args(args)
        try:
            self.config = parser.parse_args(args)
        except Exception as error:
            self.problems, accepted = explain(args, parser.parse_args, self._known_classes)
            if not self.problems:
                raise ValueError(reason(str(error))) from None
            # Go on with what was fine, so that a wrong key and a batch that does not divide are told together.
            self.config = parser.parse_args(accepted)

    def _known_classes(self, key: str) -> list[str]:
        bases: dict[str, type] = {group: base for group, (base, _) in CALLBACKS.items()}
        bases |= {"data": LightningDataModule, "optimizer": Optimizer, "data.tokenizer": lit_llm.data.Tokenizer}
        return sorted(c.__name__ for c in concrete_subclasses(bases[key])) if key in bases else []

    # -- building ---------------------------------------------------------------------------------------------------

    def _set_seed(self) -> None:
        # The launcher's own "Seed set to" and device lines would be the first thing a newcomer reads.
        warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        super()._set_seed()

    def instantiate_classes(self) -> None:
        """Build everything that is cheap, gather every problem, and only then go on."""
        config = self.config
        config.run_dir = str(config.run_dir or default_run_dir(config_files_in(self.arguments)))
        self.run_dir = Path(config.run_dir)
        problems = self.problems
        built: dict[str, Any] = {}
        for group in ("model", "loss", "data", *CALLBACKS):
            try:
                built[group] = self.parser.instantiate_classes(Namespace({group: config[group]})).get(group)
            except ValueError as error:
                problems.append(reason(str(error)))
        self.config_init = Namespace(built)
        self.datamodule = built.get("data")
        model_config: GPTConfig | None = built.get("model")
        if model_config is not None:
            problems += model_config.problems()
            problems += self._share_block_size(model_config)
        if built.get("loss") is not None:
            problems += built["loss"].problems()
        trainer = None
        if self.command != "prepare":
            problems += self._optimizer_problems()
            try:
                trainer = self.instantiate_trainer()
            except (MisconfigurationException, ValueError) as error:
                problems.append(f"trainer: {' '.join(str(error).split())}")
        if hasattr(self.datamodule, "problems"):
            problems += self.datamodule.problems(1 if trainer is None else trainer.world_size)
        self.checkpoint = self._checkpoint_to_load(problems)
        if problems:
            raise ValueError("\n".join(problems))
        if trainer is not None:
            assert model_config is not None
            self.trainer = trainer
            self.model = LanguageModel(model_config, self._optimizer_factory, built["loss"])

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
        try:
            self._optimizer_factory([{"params": [matrix], "name": "matrix"}, {"params": [vector], "name": "vector"}])
        except (ValueError, TypeError, RuntimeError) as error:
            return [f"optimizer {self.config.optimizer.class_path} cannot be built: {str(error).rstrip('.')} (--optimizer)"]
        return []

    def _checkpoint_to_load(self, problems: list[str]) -> Path | None:
        try:
            if self.command == "fit":
                # Other ranks of the same machine start after rank 0 has made the folder; only rank 0 judges what was there.
                rank = getattr(rank_zero_only, "rank", 0)
                if rank != 0 and self.config.resume == "never":
                    return None
                if self.config.replace and rank == 0 and not problems:
                    set_aside(self.run_dir)
                return resume_checkpoint(self.run_dir, self.config.resume)
            if self.command in ("validate", "test"):
                if self.config.ckpt_path in ("last", "best"):
                    return find_checkpoint(self.run_dir, self.config.ckpt_path)
                return existing_checkpoint(self.config.ckpt_path)
        except ValueError as error:
            problems.append(str(error))
        return None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config.trainer.clone()
        config = self.parser.instantiate_classes(Namespace(trainer=config)).trainer
        groups = [self.config_init.get(group) for group in CALLBACKS]
        chosen = [callback for callback in groups if callback is not None]
        if config.enable_progress_bar is False:
            chosen = [callback for callback in chosen if not isinstance(callback, callbacks.TrainingProgress)]
        if self.command != "fit":
            config.logger = False  # evaluating a run must not write into its curves
            chosen = [c for c in chosen if isinstance(c, callbacks.TrainingProgress)]
        elif config.logger in (None, True):
            config.logger = TensorBoardLogger(save_dir=self.run_dir, name="", version="")
        config.default_root_dir = str(self.run_dir)
        trainer = self._instantiate_trainer({**config.as_dict(), **kwargs}, chosen)
        if type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO":
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do what the command says; fit, validate and test end with a table."""
        if self.command == "fit":
            self._fit()
        elif self.command == "prepare":
            if self.config.out is None:
                raise ValueError("prepare needs to know where to write (--out DIR)")
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
            evaluate(self.model, datamodule=self.datamodule, ckpt_path=self.checkpoint, verbose=False, weights_only=True)
            self._print_metrics("val" if self.command == "validate" else "test")

    def _fit(self) -> None:
        trainer = self.trainer
        trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.checkpoint, weights_only=True)
        if trainer.interrupted:
            return
        if "val/loss" not in trainer.callback_metrics:  # a finished run that was resumed, or --validation null
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        self._print_metrics("val")

    @rank_zero_only
    def _print_metrics(self, prefix: str) -> None:
        metrics = self.trainer.callback_metrics
        table = Table("metric", "value", title=f"{self.run_dir} at step {self.trained_steps()}", title_justify="left")
        for name in (f"{prefix}/loss", f"{prefix}/perplexity", f"{prefix}/bits_per_byte"):
            if name in metrics and math.isfinite(float(metrics[name])):
                table.add_row(name, f"{float(metrics[name]):.4f}")
        Console(file=sys.stdout).print(table)

    def trained_steps(self) -> int:
        """Optimizer steps behind the weights that were evaluated."""
        if self.command == "fit":
            return self.trainer.global_step
        assert self.checkpoint is not None
        return int(torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"])


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


def expand_run(arguments: list[str]) -> list[str]:
    """`--run DIR` stands for the configuration of that run folder, wherever it has been moved to."""
    expanded: list[str] = []
    position = 0
    while position < len(arguments):
        key, equals, value = arguments[position].partition("=")
        if key != "--run":
            expanded.append(arguments[position])
            position += 1
            continue
        if not equals:
            if position + 1 == len(arguments):
                raise ValueError("--run needs a run folder, like --run runs/quickstart")
            value = arguments[position + 1]
        position += 1 if equals else 2
        if not (Path(value) / CONFIG).is_file():
            raise ValueError(f"{value} is no run folder: it has no {CONFIG} (--run)")
        expanded += ["--config", str(Path(value) / CONFIG), "--run_dir", value]
    return expanded


def config_files_in(arguments: list[str]) -> list[str]:
    """The values of --config, in order."""
    files = []
    for i, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key in ("--config", "-c") and (equals or i + 1 < len(arguments)):
            files.append(value if equals else arguments[i + 1])
    return files


def main(command: Command, arguments: list[str]) -> None:
    """Entry point of fit, validate, test and prepare."""
    RecipeCLI(command, arguments).run()
