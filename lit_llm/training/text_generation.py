"""The base class of a LightningModule that writes and scores text. `TextSamples` and `TaskScores` call it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_llm.core._lightning import trainer_of
from lit_llm.core.errors import UserError
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.models.gpt import GPT
from lit_llm.runs.run_folder import CONFIG
from lit_llm.runs.tokenizer_files import ExportedTokenizer
from lit_llm.tokenizers import TOKENIZER_FILE


class TextGeneration(L.LightningModule):
    """Subclasses set the model, its configuration and the tokenizer of the data."""

    config: GPTConfig
    model: GPT | CustomModel | PipelinedGPT | None
    tokenizer: Any

    @property
    def data(self) -> Any:
        """The data module; None without one."""
        return getattr(trainer_of(self), "datamodule", None)

    @property
    def prompt_start(self) -> list[int]:
        """The end-of-document id, if documents are masked and begin with it in training. If empty, BOS or nothing is used."""
        # Conversations have no end-of-document id, only their template. Without a `TokenDataModule`, GPT finds the ids.
        opens = self.config.mask_documents and getattr(self.data, "ends_open", True)
        return [self.config.eos_id] if opens and self.config.eos_id is not None else []

    @property
    def context_length(self) -> int:
        """The largest number of tokens that the model reads at once."""
        return self.config.block_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, T, V) of ids (B, T), on every rank. Each sequence is one document, as in an exported model."""
        assert self.model is not None
        documents = {"documents": torch.zeros_like(input_ids)} if self.config.mask_documents else {}
        found = self.model(input_ids, **documents)
        assert isinstance(found, Tensor)
        return found

    @cached_property
    def exported_tokenizer(self) -> ExportedTokenizer | None:
        """The tokenizer of an exported model, if there is a run folder to export."""
        run = Path(self.trainer.default_root_dir)
        is_run = (run / CONFIG).is_file() and (run / TOKENIZER_FILE).is_file()
        return ExportedTokenizer(run, eos_id=self.config.eos_id) if is_run else None

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """The likeliest ids after `ids`, one by one; no id ends them."""
        model: Any = self.model
        known = self.tokenizer.vocab_size if self.exported_tokenizer is None else None  # an exported one decodes any id
        return generate(model, ids, max_new_tokens=max_new_tokens, sampling=Sampling(temperature=0), vocab_size=known)

    def generate_text(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """The prompt and its continuation. Sampling has its own random generator, so it does not affect training.

        Raises:
            UserError: if the data has no tokenizer, or a sampling setting is out of range.
        """
        if self.tokenizer is None:
            raise UserError("Generating text needs a tokenizer: set --data.tokenizer.")
        model: Any = self.model  # a pipeline's part gives the logits of the whole
        ids, sampling = prompt_ids(self.tokenizer, prompt, prefix=self.prompt_start), Sampling(temperature, top_k, top_p, seed)
        end, size = self.tokenizer.eos_id, self.tokenizer.vocab_size
        new = generate(model, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_id=end, vocab_size=size)
        return prompt + self.tokenizer.decode(list(new))
