"""What a model takes from the data's tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.core.errors import UserError
from lit_llm.models.config import GPTConfig


def with_vocabulary(config: GPTConfig, data: Any) -> GPTConfig:
    """A copy with the size of the data's vocabulary and its end-of-document id, where the configuration does not say them.

    Args:
        data: the data module; None without one. Of a user's, attributes may be missing.

    Raises:
        UserError: the model does not fit the data's tokenizer.
    """
    data_vocab_size, config = getattr(data, "vocab_size", None), replace(config)
    if config.vocab_size is None:
        config.vocab_size = data_vocab_size
    elif data_vocab_size is not None and data_vocab_size > config.vocab_size:
        raise UserError(
            f"The data's tokenizer has {data_vocab_size} ids, but model.vocab_size is {config.vocab_size}. "
            "Remove --model.vocab_size to use the data's."
        )
    elif data_vocab_size is not None and config.vocab_size > 2 * data_vocab_size + 256:  # beyond any padding
        rank_zero_warn(
            f"The model has {config.vocab_size:,} embeddings, but the data's tokenizer only {data_vocab_size:,} ids. The "
            "others cost memory and time, and are never used. A run from random weights needs only the data's: "
            "--model.vocab_size null."
        )
    if config.eos_id is None:
        config.eos_id = getattr(data, "eos_id", None)
    if config.mask_documents and config.eos_id is None and not getattr(data, "knows_documents", False):
        raise UserError(
            "model.mask_documents needs to know where documents end, but the shards do not say it, and the data's "
            "tokenizer has no end-of-document id. Prepare the data again, set --model.eos_id, or set "
            "--model.mask_documents false."
        )
    return config
