"""The token streams of a run's data, by split and source, with their vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.data.document_ends import Documents
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatForm
from lit_llm.ingest.token_parts import PartCounts
from lit_llm.tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Opened token streams with the keys "train", "val" and optionally "test", and their vocabulary.

    The streams of a mixture have the name of their source before it: "web/train".
    """

    streams: dict[str, TokenStream]
    vocab_size: int
    tokenizer: Tokenizer | None
    text_sizes: Mapping[str, PartCounts] = field(default_factory=dict)
    """Split → its counts from tokenisation, for splits with all their shards."""
    eos_id: int | None = None
    """The id that ends every document; None: no id does."""
    bos_id: int | None = None
    """The id that opens every document; None: no id does."""
    train_streams: tuple[str, ...] = ("train",)
    """The streams that training reads."""
    sources: tuple[str, ...] = ()
    """The names of a mixture's sources, in the order of their numbers in a batch's "sources". Empty without a mixture."""

    def refuse_training(self, block_size: int, packing: str) -> None:
        """Raises:
        UserError: training cannot read blocks of this size, packed in this way.
        """
        tokens = self.tokens_of("train")
        if tokens < block_size + 1:
            raise UserError(
                f"The training text has {tokens} tokens, but a block needs {block_size + 1} ({block_size} and the next one): "
                "give more text, or lower --model.block_size."
            )
        if self.pairs and self.sources:
            raise UserError(
                "A mixture has no pairs of answers: train on one folder with them (--data TokenShards --data.path DIR)."
            )
        if self.pairs and packing != "best_fit":
            raise UserError("Both answers of a pair must be in one block (--data.packing best_fit).")

    def of_split(self, split: str) -> dict[str, TokenStream]:
        """Name → stream of a split, for each source that has it."""
        return {name: stream for name, stream in self.streams.items() if split_of(name) == split}

    def tokens_of(self, split: str) -> int:
        """Number of tokens of a split, over all sources."""
        return sum(map(len, self.of_split(split).values()))

    @property
    def masked(self) -> bool:
        """Whether a mask excludes tokens of a training stream from the targets."""
        return any(self.streams[name].masked for name in self.train_streams)

    @property
    def chat_form(self) -> ChatForm | None:
        """The form of the training conversations; None if the documents are none."""
        return next(iter(chat_forms(self.streams[name] for name in self.train_streams)), None)

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer."""
        return any(stream.pairs for stream in self.streams.values())

    def pair_positions(self) -> np.ndarray:
        """(n,) int64, ascending: the positions of all pairs of all splits, as in "pairs" of a batch."""
        starts = (pool + self.tokens_before(name) for name in self.streams for pool, _ in self.documents(name).pools(2**18))
        return np.concatenate([*starts, np.empty(0, dtype=np.int64)])

    def tokens_before(self, name: str) -> int:
        """The number of tokens in the streams before the stream ``name``."""
        return sum(len(stream) for other, stream in islice(self.streams.items(), list(self.streams).index(name)))

    def documents(self, name: str) -> Documents:
        """The documents of a stream."""
        return Documents(self.streams[name], ends_open=self.ends_open(name))

    def ends_open(self, name: str) -> bool:
        """Whether the id that ends a document of a stream opens the next: all documents end with an id, and begin with none."""
        said = self.streams[name].ends_open
        return (self.eos_id is not None and self.bos_id is None) if said is None else said

    def token_bytes(self) -> Tensor | None:
        """(V,) int64: the UTF-8 bytes of each id; None without a tokenizer. Ids that the tokenizer lacks have 0 bytes."""
        if self.tokenizer is None:
            return None
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)
        known = torch.from_numpy(self.tokenizer.token_bytes())
        sizes[: len(known)] = known
        return sizes

    def token_bytes_of(self, split: str) -> Tensor | None:
        """`token_bytes`; in float64 and corrected, if their sum over the split is not the number of bytes of the text.

        If the text has unknown characters, the unknown id gets the mean of their bytes. In other cases, such as a space that a
        tokenizer puts before each text, the bytes of all ids are scaled by one factor.
        """
        sizes, text = self.token_bytes(), self.text_sizes.get(split)
        if sizes is None or text is None or text.bytes == text.token_bytes:
            return sizes
        sizes, unknown = sizes.double(), None if self.tokenizer is None else self.tokenizer.unknown_id
        if unknown is None or not text.unknown_tokens:
            return sizes * (text.bytes / max(text.token_bytes, 1))
        sizes[unknown] = (text.bytes - text.token_bytes) / text.unknown_tokens
        return sizes


def chat_forms(streams: Iterable[TokenStream]) -> dict[ChatForm, Path]:
    """Each form of conversations in the folders of the streams' manifests → the first folder that has it.

    Raises:
        UserError: A file of a form is missing or damaged.
    """
    forms: dict[ChatForm, Path] = {}
    for stream in streams:
        if (folder := stream.folder_of_manifest) is not None and (form := ChatForm.read(folder)) is not None:
            forms.setdefault(form, folder)
    return forms


def split_of(name: str) -> str:
    """The split of a stream: "train" of "train", and of "web/train" in a mixture."""
    return name.rpartition("/")[2]
