"""The first batch of a run as text, for a user who wants to look at the batch before the launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from lit_llm.core._torch import IGNORED
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.tokenizers import Tokenizer


def first_batch(data: TokenDataModule, sequences: int) -> Iterator[str]:
    """Yield lines of text that show the first sequences of a new run's first global batch, document by document.

    Prepares and opens the data. If a shard does not say where documents end, a sequence counts as one document.

    Args:
        data: a data module with the batch sizes of the recipe, without a Trainer.
        sequences: the number of sequences to show, at most.
    """
    data.prepare_data()
    data.setup()
    data.gives_documents = True  # `LanguageModel.setup` sets whether the model asks for them
    blocks, size = data.blocks("train"), data.samples.size(0)
    batch = blocks[data.locate(np.arange(min(sequences, size)))]
    yield f"first batch of a new run: {size:,} sequences of {data.block_size:,} tokens; of R ranks, rank 0 reads the first 1/R"
    yield from batch_as_text(batch, data.tokenizer, data.source_names)


def batch_as_text(batch: Mapping[str, Tensor], tokenizer: Tokenizer | None, source_names: Sequence[str] = ()) -> Iterator[str]:
    """Yield lines of text that show the inputs and targets of each document of each sequence of a batch, as Python literals.

    Args:
        tokenizer: decodes the tokens. None: the lines have token ids instead of text.
        source_names: the sources of a mixture, which the lines name.
    """
    for row, (inputs, targets) in enumerate(zip(batch["input_ids"].numpy(), batch["targets"].numpy(), strict=True)):
        source = f", source {source_names[int(batch['sources'][row])]}" if "sources" in batch else ""
        yield f"sequence {row + 1}{source}"
        documents = batch["documents"][row].numpy() if "documents" in batch else np.zeros_like(inputs)  # (T,)
        for places in np.split(np.arange(len(inputs)), np.flatnonzero(np.diff(documents)) + 1):
            number = int(documents[places[0]])
            if number == len(inputs):
                yield f"  padding: {len(places):,} tokens"
                continue
            pair = f"pair {number // 2 + 1}, {'rejected' if number % 2 else 'chosen'}"
            yield f"  {pair if 'pairs' in batch else f'document {number + 1}'}: {len(places):,} tokens"
            yield f"    inputs   {_text(inputs[places], tokenizer)}"
            yield f"    targets  {_text(targets[places], tokenizer)}"


def _text(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The text of token ids (n,) as a Python literal (no tokenizer: the ids). n ignored targets (-100) become "[n masked]"."""
    parts = []
    for run in np.split(ids, np.flatnonzero(np.diff(ids == IGNORED)) + 1):
        if run[0] == IGNORED:
            parts.append(f"[{len(run):,} masked]")
        else:
            parts.append(" ".join(map(str, run)) if tokenizer is None else repr(tokenizer.decode(run)))
    return " ".join(parts)
