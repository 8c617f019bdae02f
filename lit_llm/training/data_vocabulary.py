"""Completes a model's configuration from the data module (vocabulary, end of document), and checks the first batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.models.config import GPTConfig


def with_vocabulary(config: GPTConfig, data: Any) -> GPTConfig:
    """A copy of `config` in which `vocab_size` and `eos_id` are the data's, where `config` has None.

    Args:
        data: the data module, or None. A user's data module may lack these attributes.

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


_IDS = (torch.int64, torch.int32)  # what an embedding reads


def check_batch(batch: Any, data: object) -> None:
    """Check that a batch is a dict with `input_ids` and `targets`, both (B, T), as `LanguageModel` needs.

    Args:
        data: the data module, which may be a user's; the error message names its class.

    Raises:
        UserError: The batch is no such dict, or a tensor in it has another shape or dtype.
    """
    seen = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    inputs, targets = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "targets"))
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        if inputs.ndim == 2 and inputs.shape == targets.shape and targets.dtype == torch.int64 and inputs.dtype in _IDS:
            return
        said = [f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (inputs, targets)]
        seen = f"input_ids {said[0]} and targets {said[1]}"
    raise UserError(
        f"a batch of {type(data).__name__} is {seen}, but must be a dict of input_ids and targets, both (B, T) int64, with "
        "targets that are already shifted by one (docs/own-data.md) (--data)"
    )
