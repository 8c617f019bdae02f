"""A callback that writes config.yaml and the tokenizer into the run folder, prints what runs, and gives settings to loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from lit_llm.checkpoint.io import AsyncFolderCheckpointIO
from lit_llm.core.disk import write_text
from lit_llm.core.errors import report
from lit_llm.data import TokenDataModule
from lit_llm.data.run_length import run_length
from lit_llm.ingest.chat import CHAT_TEMPLATE_FILE
from lit_llm.models.attention_kernel_choice import describe
from lit_llm.models.gpt import GPT
from lit_llm.models.lora import trainable
from lit_llm.runs.run_folder import CONFIG, LOGGER_RUN_ARGUMENTS, LOGGER_RUNS, run_of
from lit_llm.runs.setting_changes import SETTINGS, Change, rule
from lit_llm.runs.tokenizer_files import copy_companions, write_taught_ids
from lit_llm.tokenizers import TOKENIZER_FILE
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.meeting import refuse_other_data

METRICS = ("val/loss", "val/bits_per_byte", "train/loss")
"""Metrics whose last values TensorBoard's tab of hyper-parameters shows beside the settings."""
CONFIG_TAG = "settings/config.yaml"
"""TensorBoard's tag for the text of config.yaml. Texts are sorted by tag: this one comes after generated samples."""
_ALSO = ("trainer.max_steps", "trainer.precision", "trainer.devices")


class SaveRunFolder(Callback):
    """Makes a run folder self-contained: writes config.yaml, which can be run again unchanged, and the tokenizer.

    Args:
        text: the content of config.yaml.
        settings: the settings by key, for checkpoints and loggers.
        scratch: whether the run is temporary. Its length is then not printed, because it differs from the recipe's.
    """

    def __init__(self, text: str, settings: dict[str, Any], *, scratch: bool) -> None:
        self.text, self.settings, self.scratch = text, settings, scratch
        self._saved = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS] = self.settings  # a resume compares them

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._saved:  # an evaluation after training
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TokenDataModule):
            refuse_other_data(data.state_dict())
        if trainer.is_global_zero:
            self._save(trainer, pl_module)
        trainer.strategy.barrier("run folder")
        self._saved = True

    def _save(self, trainer: Trainer, pl_module: Any) -> None:
        run_dir = Path(trainer.default_root_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / CONFIG, self.text)
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is not None:
            weights = None if pl_module.init_from is None else run_of(pl_module.init_from)
            if weights is not None and (weights / TOKENIZER_FILE).is_file():  # `fit` has compared the vocabularies
                copy_companions(weights, run_dir)
            tokenizer.save(run_dir)  # after the companions: the ids around documents are this run's
            form = getattr(trainer.datamodule, "chat_form", None)  # type: ignore[attr-defined]
            if form is not None:
                write_text(run_dir / CHAT_TEMPLATE_FILE, form.template)  # instead of the template of the weights
            write_taught_ids(run_dir, tokenizer, form)
        for logger in trainer.loggers:
            log_settings(logger, self.settings, self.text, trainer.global_step)
        names = [(type(logger).__name__, logger) for logger in trainer.loggers]
        if runs := {name: logger.version for name, logger in names if name in LOGGER_RUN_ARGUMENTS}:
            write_text(run_dir / LOGGER_RUNS, json.dumps(runs))

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On rank 0, print the sizes of model and data, the batch, and the length of the run."""
        assert isinstance(pl_module, LanguageModel) and pl_module.model is not None
        data = trainer.datamodule  # type: ignore[attr-defined]
        print(f"model: {pl_module.model.num_parameters():,} parameters, vocabulary {pl_module.config.vocab_size:,}")
        if isinstance(pl_module.whole_model, GPT):
            print(describe(pl_module.config, pl_module.compute_config.attention, trainer.strategy.root_device))
        if getattr(trainer.strategy, "sharded_checkpoints", False):
            background = isinstance(trainer.strategy.checkpoint_io, AsyncFolderCheckpointIO)
            how = "in the background, from a copy in host memory" if background else "while training waits"
            print(f"checkpoints: each rank writes its part, {how}")
        if pl_module.lora is not None:
            trained, everything = trainable(pl_module.whole_model)
            print(f"lora: {trained:,} parameters are trained ({trained / everything:.2%}), rank {pl_module.lora.rank}")
            print(f"base: the frozen weights of {pl_module.init_from}")
        if isinstance(data, TokenDataModule):
            assert data.block_size is not None
            if pl_module.init_from is not None and pl_module.lora is None:
                print(f"start: the weights of {pl_module.init_from}")
            print(f"data: {data.train_tokens:,} training tokens, {data.val_tokens:,} validation tokens")
            report(data.opened.cut_conversations(), "note")
            for first, sequences in data.samples.stages:
                parts = _count(data.samples.micro_batches(first), "micro-batch")
                size, most = data.samples.micro_batch(first), data.micro_batch_size
                smaller = "" if most in (None, size) else f", of {size} (data.micro_batch_size {most})"
                processes = _count(trainer.world_size, "process")
                print(
                    f"{f'from step {first + 1:,} on' if first else 'step'}: {sequences} sequences of {data.block_size} = "
                    f"{sequences * data.block_size:,} tokens, in {parts} on each of {processes}{smaller}"
                )
            if not self.scratch:
                print(f"run: {run_length(data, trainer.max_steps)}, into {trainer.default_root_dir}")
                for line in data.describe_phases():
                    print(line)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'es' if number != 1 else ''}"


def log_settings(logger: Logger, settings: Mapping[str, Any], config: str, step: int) -> None:
    """Give the settings of a run to a logger, once per launch, on rank 0.

    TensorBoard gets config.yaml as a text, and a row of its tab of hyper-parameters with the settings that change the result.
    A resumed run writes both again, and TensorBoard shows them once. Other loggers get all settings by key.

    Args:
        settings: key → value of all settings.
        config: the content of config.yaml.
        step: the optimizer step at which the launch starts.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(CONFIG_TAG, f"```yaml\n{config}\n```", step)
        if writer := logger.experiment.file_writer:
            experiment, start, _ = hparams(shown(settings), dict.fromkeys(METRICS, 0.0))
            writer.add_summary(experiment)
            writer.add_summary(start)
        return
    known: Mapping[str, Any] = {}
    if isinstance(logger, MLFlowLogger):  # MLflow refuses to change the parameters of a continued run
        known = logger.experiment.get_run(logger.run_id).data.params
    logger.log_hyperparams({key: value for key, value in settings.items() if key not in known})


def shown(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings that change the result and are not None, with values that are bool, int, float or text for TensorBoard."""
    plain: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        decides = rule(key) in (Change.REFUSED, Change.MODEL, Change.DATA) or key in _ALSO
        if decides and value is not None:
            plain[key] = value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
    return plain
