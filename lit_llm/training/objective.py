"""Objectives: the loss that training minimises, as a function of hidden states, the output matrix and a batch.

For each micro-batch, an objective makes a loss function, and the model calls this function with the hidden states of its rank's
positions. So every objective uses the same LightningModule, and pipelines, tensor and context parallelism, accumulation and
means over the global batch work as for cross-entropy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, LossFunction
from lit_llm.models.loss import LossConfig, LossHead, chunked_cross_entropy, cross_entropy, cross_entropy_of_logits


class Objective(ABC):
    """Base class of objectives, which define the loss to minimise: a global batch's Σ `LossSums.loss` / Σ `LossSums.count`."""

    of_tokens: ClassVar[bool] = True
    """Whether the loss is in nats per token of text. Perplexity and bits per byte are logged only if it is."""
    uses_pairs: ClassVar[bool] = False
    """Whether the data must be pairs of answers (`lit_llm.data.blocks.PairBlocks`). If False, `use` refuses pairs."""
    loss_head: ClassVar[LossHead] = "cross-entropy"
    """The kind of loss function, from which `plan` computes the memory and FLOPs of the loss."""
    needs_gpt: ClassVar[bool] = False
    """Whether the objective trains only a GPT. If False, it also trains custom architectures."""
    uses_reference: bool = False
    """Whether batches need "reference", (B, D): log-probabilities of documents under the weights at the start of training."""

    @abstractmethod
    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        """Return the loss function of a micro-batch, with the arguments and the result of `lit_llm.models.loss.cross_entropy`.

        Args:
            batch: a batch of the data module, on the device of the model.
            loss: the settings of the group `loss`.
            model: the whole model, also in a pipeline. If ranks share sequences, `GPT.own_positions` selects a rank's part.
        """

    def use(self, data: Any, stage: str) -> None:
        """Check that the data fit the objective, and read from them what the objective needs. Called when the data are open.

        Args:
            stage: "fit", "validate" or "test".

        Raises:
            UserError: the data are pairs and the objective needs tokens, or the reverse.
        """
        name, pairs = type(self).__name__, bool(getattr(data, "pairs", False))
        if self.uses_pairs and not pairs:
            raise UserError(
                f"objective {name} compares two answers, but the data are no pairs: prepare rows with prompt, chosen and "
                "rejected (prepare --chat_template auto, then --data TokenShards --data.path DIR)."
            )
        if pairs and not self.uses_pairs:
            raise UserError(
                f"The data are pairs of a chosen and a rejected answer, and {name} would learn both: use --objective "
                "Preference."
            )

    def means(self, model: GPTConfig) -> tuple[str, ...]:
        """Names of the means to log beside the loss, in the order of `LossSums.means`: the mean "kl" is logged as train/kl."""
        return ()

    def problems(self, parts: Mapping[str, Any]) -> list[str]:
        """Why the recipe cannot use the objective, one sentence each. `parts`: a recipe's objects by group, as "model"."""
        return []


class CrossEntropy(Objective):
    """Next-token cross-entropy in nats per counted target (a target other than -100). For pretraining and fine-tuning."""

    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        settings: dict[str, Any] = {"z_loss": loss.z_loss, "by_row": "sources" in batch}
        if not isinstance(model, GPT):  # a custom model gives logits
            return partial(cross_entropy_of_logits, **settings)
        if loss.chunk_size is None:
            return partial(cross_entropy, **settings)
        return partial(chunked_cross_entropy, chunk_size=loss.chunk_size, **settings)

    def means(self, model: GPTConfig) -> tuple[str, ...]:
        return ("loss_ahead",) if model.predict_ahead else ()
