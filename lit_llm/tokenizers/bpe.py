"""A byte-level BPE learned from the training text."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_llm.errors import UserError
from lit_llm.tokenizers.base import END_OF_TEXT
from lit_llm.tokenizers.bytes import byte_symbols
from lit_llm.tokenizers.learned import Learned


class BPE(Learned):
    """A byte-level BPE with GPT-2's word splitting, trained on the training text when the data is prepared.

    Args:
        vocab_size: number of ids, including ``<|endoftext|>`` and the 256 bytes. A short text may give fewer.
    """

    def __init__(self, vocab_size: int = 4096) -> None:
        if vocab_size < 257:
            raise UserError(
                f"A BPE vocabulary of {vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}: "
                "use at least 257 (--data.tokenizer.init_args.vocab_size)."
            )
        super().__init__(vocab_size)

    def _learn(self, texts: Iterable[str]) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.requested_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_symbols()),  # so that every byte has a token, seen in training or not
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        return backend
