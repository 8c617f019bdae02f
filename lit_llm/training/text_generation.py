"""What a LightningModule needs to write and score text: `TextSamples` and `TaskScores` call it."""

from __future__ import annotations

from collections.abc import Iterator
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


class TextGeneration(L.LightningModule):
    """Subclasses set the model, its configuration and the tokenizer of the data."""

    config: GPTConfig
    model: GPT | CustomModel | PipelinedGPT | None
    tokenizer: Any

    @property
    def prompt_start(self) -> list[int]:
        """The end-of-document id, if documents are masked and each begins with it in training. Empty: BOS, or nothing."""
        data = getattr(trainer_of(self), "datamodule", None)
        # Conversations have no end: each is what its template writes. Without a `TokenDataModule`, GPT finds the ids.
        opens = self.config.mask_documents and getattr(data, "ends_open", True)
        return [self.config.eos_id] if opens and self.config.eos_id is not None else []

    @property
    def context_length(self) -> int:
        """Most tokens of a text that the model reads at once."""
        return self.config.block_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, T, V) of ids (B, T), on every rank. Each sequence is one document, as in an exported model."""
        assert self.model is not None
        documents = {"documents": torch.zeros_like(input_ids)} if self.config.mask_documents else {}
        found = self.model(input_ids, **documents)
        assert isinstance(found, Tensor)
        return found

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """The likeliest ids after `ids`, one by one, up to the end of the document."""
        assert self.model is not None
        return generate(
            self.model,  # type: ignore[arg-type]  # a pipeline's part gives the logits of the whole
            ids,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=0),
            stop_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
        )

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
        assert self.model is not None
        if self.tokenizer is None:
            raise UserError("Generating text needs a tokenizer: set --data.tokenizer.")
        ids = generate(
            self.model,  # type: ignore[arg-type]  # a pipeline's part gives the logits of the whole
            prompt_ids(self.tokenizer, prompt, prefix=self.prompt_start),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            stop_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
        )
        return prompt + self.tokenizer.decode(list(ids))
