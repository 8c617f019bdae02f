"""The attributes and methods of a LanguageModel that callbacks read or call (`lit_llm.callbacks.contracts`).

`TextSamples` and `TaskScores` call the methods that generate text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_llm.core._lightning import trainer_of
from lit_llm.core.errors import UserError
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.models.gpt import GPT
from lit_llm.models.lora import flops_saved
from lit_llm.models.loss import LossConfig
from lit_llm.models.own_flops import own_flops_per_token
from lit_llm.runs.run_folder import CONFIG
from lit_llm.runs.tokenizer_files import ExportedTokenizer
from lit_llm.tokenizers import TOKENIZER_FILE
from lit_llm.training.accumulation import Accumulation


class Answers(L.LightningModule):
    """Base class of LanguageModel: what callbacks read or call. It uses the attributes `config`, `loss_config`, `model` and
    `window` (the loss sums of the current step), which LanguageModel sets."""

    config: GPTConfig
    loss_config: LossConfig
    model: GPT | CustomModel | PipelinedGPT | None
    window: Accumulation

    @property
    def data(self) -> Any:
        """The Trainer's data module; None if there is no Trainer or no data module."""
        return getattr(trainer_of(self), "datamodule", None)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the data module; None if there is none."""
        return getattr(self.data, "tokenizer", None)

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256, in hex, of the contents of the tokenizer's files. Cached, because a large vocabulary takes time."""
        return hashlib.sha256("".join(self.tokenizer.files().values()).encode()).hexdigest()

    @property
    def mesh(self) -> MeshStrategy | None:
        """The Trainer's strategy if it is a MeshStrategy; else None."""
        strategy = getattr(trainer_of(self), "strategy", None)
        return strategy if isinstance(strategy, MeshStrategy) else None

    @property
    def whole_model(self) -> GPT | CustomModel:
        """The whole model, also in a pipeline, where the layers of other ranks are on the meta device."""
        assert self.model is not None
        return self.model.whole if isinstance(self.model, PipelinedGPT) else self.model

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token in sequences of the data's block size, minus the FLOPs that LoRA saves (`flops_saved`).

        For a custom architecture, `own_flops_per_token` counts its operations' FLOPs, or takes six per parameter and token.
        """
        model, length = self.whole_model, getattr(self.data, "block_size", None)
        if isinstance(model, CustomModel):
            return sum(own_flops_per_token(model.architecture, model.vocab_size, length or self.config.block_size))
        return self.config.flops_per_token(length) - flops_saved(model)

    @property
    def every_target_counts(self) -> bool:
        """Whether the data module declares that no training target is ignored, so that all micro-batches have equal weight.

        False if ranks share sequences (context parallelism).
        """
        shares_sequences = self.mesh is not None and self.mesh.context > 1  # a rank's part of a sequence may be padding
        return getattr(self.data, "every_target_counts", False) and not shares_sequences

    @property
    def holds_all_logits(self) -> bool:
        """Whether training has the logits of a whole micro-batch in memory. The callback `HealthSignals` reads this."""
        return self.loss_config.chunk_size is None

    def first_gradient_scale(self) -> Tensor | float:
        """The factor that turns the gradient after a step's first micro-batch into the gradient of that micro-batch's loss."""
        return self.window.first_gradient_scale(self.trainer.accumulate_grad_batches)

    @property
    def expert_biases(self) -> list[Tensor | None] | None:
        """For each block with experts, the bias (E,) that its router adds to choose experts; None on ranks without the block.

        None instead of a list if no block has experts.
        """
        biases = [] if self.model is None else [router.choice_bias for router in self.whole_model.routers]
        return [None if bias.is_meta else bias for bias in biases] or None

    # -- text ---------------------------------------------------------------------------------------------------------

    @property
    def prompt_start(self) -> list[int]:
        """The ids to put before a prompt: the end-of-document id, if it precedes documents in training, with document masks.

        Otherwise empty: the function `prompt_ids` then puts BOS before the prompt, if the tokenizer has one.
        """
        # No end-of-document id precedes a conversation. Without a `TokenDataModule`, GPT itself finds documents by that id.
        opens = self.config.mask_documents and getattr(self.data, "ends_open", True)
        return [self.config.eos_id] if opens and self.config.eos_id is not None else []

    @property
    def context_length(self) -> int:
        """The largest number of tokens in a sequence that the model reads (block_size)."""
        return self.config.block_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of ids (B, T), on every rank. Each sequence is one document, as in an exported model."""
        assert self.model is not None
        documents = {"documents": torch.zeros_like(input_ids)} if self.config.mask_documents else {}
        logits = self.model(input_ids, **documents)
        assert isinstance(logits, Tensor)
        return logits

    @cached_property
    def exported_tokenizer(self) -> ExportedTokenizer | None:
        """The tokenizer that an export of this run would have; None if the run folder has no config.yaml or tokenizer.json."""
        run = Path(self.trainer.default_root_dir)
        is_run = (run / CONFIG).is_file() and (run / TOKENIZER_FILE).is_file()
        return ExportedTokenizer(run, eos_id=self.config.eos_id) if is_run else None

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """Yield `max_new_tokens` ids that continue `ids`, each the likeliest next id. No end-of-document id ends the loop."""
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
        """Return the prompt followed by its continuation. Sampling has its own random generator, so training is not affected.

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
