"""`--init_from`: a run starts with the weights of another run, or with imported ones, instead of random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_llm.checkpoint.compatibility import model_changes, model_settings, saved_architecture, saved_model_config
from lit_llm.checkpoint.format import read, verify
from lit_llm.checkpoint.manifest import MANIFEST
from lit_llm.errors import UserError
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.ranks import is_rank_zero
from lit_llm.runs.run_folder import find_checkpoint
from lit_llm.runs.tokenizer_file import run_of, tokenizer_problem
from lit_llm.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from: weights only, so the run begins at step 0 with a fresh optimizer."""

    checkpoint: Path
    model: GPTConfig
    architecture: Architecture | None
    """The custom model that the weights belong to; None for a GPT."""
    tokenizer_file: Path | None
    """The tokenizer in its run folder."""

    @classmethod
    def find(cls, path: Path) -> InitialWeights:
        """The checkpoint at `path`, or the last one of the run folder `path`.

        Raises:
            UserError: It is neither, or not a checkpoint of lit_llm.
        """
        if (path / "config.json").is_file():
            raise UserError(
                f"{path} is a Hugging Face folder; make a run folder of it first: "
                f"python -m lit_llm import --from {path} --out RUN (--init_from)"
            )
        if not path.exists():
            raise UserError(f"there is no run folder or checkpoint {path} (--init_from)")
        is_checkpoint = path.is_file() or (path / MANIFEST).is_file()
        checkpoint = path if is_checkpoint else find_checkpoint(path, "last")
        content = read(checkpoint, verify=False, lazy=True)
        model = saved_model_config(content, checkpoint, "--init_from")
        file = (run_of(path) if is_checkpoint else path) / TOKENIZER_FILE
        return cls(checkpoint, model, saved_architecture(content), file if file.is_file() else None)

    def defaults(self) -> dict[str, Any]:
        """Defaults that follow from the weights, for the model and the tokenizer. Recipes and flags override them."""
        model = self.model
        if self.tokenizer_file is None:
            return self._model_defaults(model)
        if load_tokenizer(self.tokenizer_file).eos_id is not None:
            model = replace(model, eos_id=None)  # the data's end of document, not a chat model's end of turn
        tokenizer = {"class_path": "lit_llm.data.TokenizerJSON", "init_args": {"path": str(self.tokenizer_file)}}
        data = {"class_path": "lit_llm.data.PythonStdlib", "init_args": {"tokenizer": tokenizer}}
        return {"data": data, **self._model_defaults(model)}

    def _model_defaults(self, model: GPTConfig) -> dict[str, Any]:
        settings = model_settings(model, self.architecture)
        architecture = settings.pop("architecture", None)
        return {"architecture": architecture, **{f"model.{name}": value for name, value in settings.items()}}

    def damage(self) -> str | None:
        """How the checkpoint or its tokenizer is damaged, as a sentence; checked on rank 0, None on other ranks."""
        if not is_rank_zero():
            return None
        problem = verify(self.checkpoint)
        if problem is None and self.tokenizer_file is not None:
            problem = tokenizer_problem(self.checkpoint, self.tokenizer_file.parent)
        return problem and f"{problem} (--init_from)"

    def model_problems(self, model: GPTConfig, architecture: Architecture | None) -> list[str]:
        """Why the weights do not fit a model, one sentence each.

        Rotary positions fit any length. For a custom model only loading shows whether weights fit.
        """
        saved = model_settings(self.model, self.architecture)
        if model.position == "rope" or architecture is not None:
            saved["block_size"] = model.block_size
        return model_changes(saved, model, architecture, accepted=True)

    def tokenizer_problem(self, tokenizer: Tokenizer | None) -> str | None:
        """A sentence if the data use another tokenizer than the weights. None also if one of them has no tokenizer."""
        if tokenizer is None or self.tokenizer_file is None:
            return None
        if tokenizer.identity() == load_tokenizer(self.tokenizer_file).identity():
            return None
        return (
            f"the data's tokenizer is not that of the weights in {self.checkpoint}: use "
            f"--data.tokenizer TokenizerJSON --data.tokenizer.path {self.tokenizer_file}"
        )
