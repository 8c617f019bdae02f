"""`--init_from`: a run starts with the weights of another run, or with imported ones, instead of random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_llm.checkpoint.adapters import base_damage
from lit_llm.checkpoint.compatibility import (
    BASES,
    model_changes,
    model_settings,
    reinterpretations,
    saved_architecture,
    saved_model_config,
)
from lit_llm.checkpoint.dcp_folder import is_dcp_folder
from lit_llm.checkpoint.disk_format import damage_before_load
from lit_llm.checkpoint.manifest import MANIFEST
from lit_llm.core.errors import UserError
from lit_llm.core.ranks import is_rank_zero
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.runs.run_folder import refuse_hugging_face, run_of
from lit_llm.runs.saved_run import SavedRun, find_checkpoint
from lit_llm.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer

BASE_HELP = "of a LoRA run: the run folder or checkpoint of its base weights, if they were moved"
"""The help text of the flag --init_from of commands that read a LoRA run."""


def named_base(path: str | None) -> Path | None:
    """The checkpoint that the value of --init_from names: `path` itself, or the last checkpoint if `path` is a run folder. None
    if `path` is None.

    Raises:
        UserError: There is no checkpoint at `path`.
    """
    return None if path is None else InitialWeights.find(Path(path)).checkpoint


@dataclass(frozen=True)
class InitialWeights:
    """Record of the checkpoint with whose weights a run starts, at step 0 and with a new optimizer. `model`: the model settings
    in the checkpoint."""

    saved: SavedRun
    model: GPTConfig
    architecture: Architecture | None
    """Class and arguments of the custom model to which the weights belong; None for a GPT."""
    tokenizer_file: Path | None
    """The tokenizer.json in the run folder of the checkpoint; None if the folder has no such file."""

    @property
    def checkpoint(self) -> Path:
        return self.saved.path

    @classmethod
    def find(cls, path: Path) -> InitialWeights:
        """The initial weights at `path`, which is a checkpoint, or a run folder, whose last checkpoint is taken.

        Raises:
            UserError: `path` is neither of these, or the checkpoint is of another program.
        """
        refuse_hugging_face(path, "--init_from")
        if is_dcp_folder(path):
            raise UserError(
                f"{path} is a folder of torch.distributed.checkpoint; make a run folder of it first: "
                f"python -m lit_llm import --from {path} --out RUN (--init_from)"
            )
        if not path.exists():
            raise UserError(f"there is no run folder or checkpoint {path} (--init_from)")
        is_checkpoint = path.is_file() or (path / MANIFEST).is_file()
        checkpoint = path if is_checkpoint else find_checkpoint(path, "last")
        try:
            saved = SavedRun.read(checkpoint)
        except UserError as error:
            raise UserError(f"{str(error).rstrip('.')} (--init_from)") from error
        model = saved_model_config(saved.values, checkpoint, "--init_from")
        file = (run_of(path) if is_checkpoint else path) / TOKENIZER_FILE
        return cls(saved, model, saved_architecture(saved.values), file if file.exists() else None)

    def defaults(self) -> dict[str, Any]:
        """Key → default of settings of model and tokenizer that follow from the weights. Recipes and flags override these."""
        model = self.model
        defaults: dict[str, Any] = {}
        if self.tokenizer_file is not None:
            if load_tokenizer(self.tokenizer_file).eos_id is not None:
                model = replace(model, eos_id=None)  # so that the data decide: a chat model's eos_id ends a turn, no document
            tokenizer = {"class_path": "lit_llm.data.TokenizerJSON", "init_args": {"path": str(self.tokenizer_file)}}
            defaults["data"] = {"class_path": "lit_llm.data.PythonStdlib", "init_args": {"tokenizer": tokenizer}}
        settings = model_settings(model, self.architecture)
        defaults["architecture"] = settings.pop("architecture", None)
        return defaults | {
            f"model.{name}": value for name, value in settings.items() if name not in BASES
        }  # `BASES` set learning rates, which the new run decides

    def damage(self, *, ranks: int = 1) -> str | None:
        """How the checkpoint, its LoRA base or its tokenizer is damaged, as a sentence; None if intact, and on ranks above 0.

        Args:
            ranks: Number of processes that load the weights. Several processes hash the shards while loading, not here.
        """
        if not is_rank_zero():
            return None
        problem = damage_before_load(self.checkpoint, ranks=ranks) or base_damage(self.saved.values, self.checkpoint)
        if problem is None and self.tokenizer_file is not None:
            problem = self.saved.tokenizer_problem(self.tokenizer_file.parent)
        return problem and f"{problem} (--init_from)"

    def model_problems(self, model: GPTConfig, architecture: Architecture | None) -> list[str]:
        """Return why the weights do not fit the model of the new run, as a list of sentences.

        With rotary positions, the block size may differ. For a custom model, only loading shows whether weights fit.
        """
        saved = model_settings(self.model, self.architecture)
        if model.position == "rope" or architecture is not None:
            saved["block_size"] = model.block_size
        return model_changes(saved, model, architecture, accepted=True)

    def reinterpretations(self, model: GPTConfig, architecture: Architecture | None) -> list[str]:
        """One sentence for each model setting that fits the shapes of the weights, but had another value in their training."""
        changes = reinterpretations(model_settings(self.model, self.architecture), model, architecture)
        return [f"{change}: the weights were trained with the former" for change in changes]

    def tokenizer_problem(self, tokenizer: Tokenizer | None) -> str | None:
        """A sentence if data and weights have different tokenizers; else None, also if the data or the weights have none."""
        if tokenizer is None or self.tokenizer_file is None:
            return None
        if tokenizer.same_vocabulary(load_tokenizer(self.tokenizer_file)):
            return None
        return (
            f"the data's tokenizer is not that of the weights in {self.checkpoint}: use "
            f"--data.tokenizer TokenizerJSON --data.tokenizer.path {self.tokenizer_file}"
        )
