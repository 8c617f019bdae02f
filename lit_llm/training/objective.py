"""Objectives: the loss that training minimises, as a function of hidden states, the output matrix and a batch.

One module, one loop and one loss head serve every objective. For each micro-batch an objective makes a loss function, which
the model calls with the hidden states of this rank's positions. So pipelines, tensor and context parallelism, accumulation
and means over the global batch work as they do for cross-entropy.
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
    """The loss that training minimises: the sum of `LossSums.loss` divided by the sum of `count`, over the global batch."""

    of_tokens: ClassVar[bool] = True
    """Whether the loss is nats per token of the text. Only then are perplexity and bits per byte logged."""
    uses_pairs: ClassVar[bool] = False
    """Whether the objective needs data of pairs (`lit_llm.data.blocks.PairBlocks`). Other objectives refuse pairs."""
    loss_head: ClassVar[LossHead] = "cross-entropy"
    """The kind of the loss function: the planner computes the memory and work of this kind."""
    needs_gpt: ClassVar[bool] = False
    """Whether the objective can train only a GPT, and no custom architecture."""
    uses_reference: bool = False
    """Whether batches have "reference", the log-probability of each document under the weights that training starts from."""

    @abstractmethod
    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        """The loss function of a micro-batch, with the arguments and the result of `lit_llm.models.loss.cross_entropy`.

        Args:
            batch: as the data module gives it, on the device of the model.
            loss: the recipe's settings of the loss.
            model: the whole model, also in a pipeline. If ranks share sequences, `GPT.own_positions` selects the rank's part.
        """

    def use(self, data: Any, stage: str) -> None:
        """Read from the open data module what the objective needs.

        Args:
            stage: "fit", "validate" or "test".

        Raises:
            UserError: data and objective do not fit each other.
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
        """Names of the rows of `LossSums.means`, such as loss_ahead, which is logged as train/loss_ahead."""
        return ()

    def problems(self, parts: Mapping[str, Any]) -> list[str]:
        """Why the objective cannot be used with `parts`, the recipe's built groups by name, one sentence each."""
        return []


class CrossEntropy(Objective):
    """Next-token cross-entropy, for pretraining and fine-tuning: nats per counted target."""

    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        settings: dict[str, Any] = {"z_loss": loss.z_loss, "by_row": "sources" in batch}
        if not isinstance(model, GPT):  # a custom model gives logits
            return partial(cross_entropy_of_logits, **settings)
        if loss.chunk_size is None:
            return partial(cross_entropy, **settings)
        return partial(chunked_cross_entropy, chunk_size=loss.chunk_size, **settings)

    def means(self, model: GPTConfig) -> tuple[str, ...]:
        return ("loss_ahead",) if model.predict_ahead else ()
