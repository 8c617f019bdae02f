"""The callback that writes config.yaml and the tokenizer into the run folder, and prints what is about to be trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_llm.data import TokenDataModule
from lit_llm.errors import UserError
from lit_llm.hf.tokenizer_files import copy_companions
from lit_llm.runs.initial_weights import InitialWeights
from lit_llm.runs.resume import is_path
from lit_llm.runs.run_folder import CONFIG
from lit_llm.training.language_model import LanguageModel

LAUNCH_ONLY = ("base", "replace", "accept_changes", "additional_steps", "check_against", "check_tolerance")


class SaveRunFolder(SaveConfigCallback):
    """Makes a run folder self-contained: config.yaml, which can be run again as it is, and the tokenizer."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # With --additional_steps each rank counts from the checkpoint of --resume PATH. If that is a link, it may have changed.
        max_steps = trainer.strategy.broadcast(trainer.max_steps)
        if max_steps != trainer.max_steps:
            raise UserError(
                f"trainer.max_steps is {max_steps} on rank 0 and {trainer.max_steps} on rank {trainer.global_rank}: the "
                "checkpoint of --resume was replaced during the launch; name a step-….ckpt instead of a link"
            )
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        run_dir = Path(trainer.default_root_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        for key in LAUNCH_ONLY:  # options of this launch, not of the run
            config.pop(key, None)
        if not is_path(config.resume):  # the checkpoint where a branch began belongs to the run
            config.pop("resume")
        text = self.parser.dump(config, skip_unset=False, skip_validation=True)
        partial = run_dir / f".{CONFIG}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, run_dir / CONFIG)
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is not None:
            tokenizer.save(run_dir)
            start = None if pl_module.init_from is None else InitialWeights.find(pl_module.init_from).tokenizer_file
            if start is not None:  # it has the same tokenizer, otherwise `fit` would have refused
                copy_companions(start.parent, run_dir)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", f"```yaml\n{text}\n```", trainer.global_step)

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print model, data and length of the run."""
        assert isinstance(pl_module, LanguageModel) and pl_module.model is not None
        data = trainer.datamodule  # type: ignore[attr-defined]
        print(f"model: {pl_module.model.num_parameters():,} parameters, vocabulary {pl_module.config.vocab_size:,}")
        if isinstance(data, TokenDataModule):
            assert data.block_size is not None
            if pl_module.init_from is not None:
                print(f"start: the weights of {pl_module.init_from}")
            print(f"data: {data.train_tokens:,} training tokens, {data.val_tokens:,} validation tokens")
            for first in [0] if data.ramp is None else [stage.step for stage in data.ramp.stages]:
                sequences = data.batch_samples(first)
                micro_batches = data.micro_batches_before(first + 1) - data.micro_batches_before(first)
                print(
                    f"{f'from step {first + 1:,} on' if first else 'step'}: {sequences} sequences of {data.block_size} = "
                    f"{sequences * data.block_size:,} tokens, in {micro_batches} micro-batch(es) on each of "
                    f"{trainer.world_size} process(es)"
                )
            tokens = data.samples_before(trainer.max_steps) * data.block_size
            print(
                f"run: {trainer.max_steps:,} steps = {tokens:,} tokens = {tokens / data.train_tokens:.2f} epochs, into"
                f" {trainer.default_root_dir}"
            )
