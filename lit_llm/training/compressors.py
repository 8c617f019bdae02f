"""Bits per byte of gzip and xz on the text on which a model is evaluated, to compare with the model's bits per byte."""

from __future__ import annotations

import gzip
import lzma
from typing import Any

import numpy as np
from lightning.pytorch import Trainer

from lit_llm.data.batches import HeldOutOrder

SAMPLE_TOKENS, SAMPLE_PARTS = 2**18, 16
"""Of a text with more than `SAMPLE_TOKENS` tokens, about `SAMPLE_TOKENS` are compressed: the starts of `SAMPLE_PARTS` parts."""


class Compressors:
    """Measures bits per byte of gzip and xz on the evaluated texts: on rank 0, in the first evaluation of each split."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}  # split → values by name

    def row(self, trainer: Trainer, data: Any, split: str) -> dict[str, float]:
        """Return {metric: bits per byte} for the split "val" or "test", empty if not measurable. Measured in the first call for
        a split, in which rank 0 prints a sentence about it. A collective."""
        if split not in self._rows:
            row: dict[str, float] = {}
            if trainer.is_global_zero:
                row, sentence = compressors(trainer, data, split)
                print(sentence)
            self._rows[split] = trainer.strategy.broadcast(row)
        return self._rows[split]


def compressors(trainer: Trainer, data: Any, split: str) -> tuple[dict[str, float], str]:
    """Compress the text that all ranks evaluate in the split "val" or "test": the counted targets, decoded.

    Returns:
        (metric, as val/gzip_bits_per_byte → bits per byte; a sentence about the text), or ({}, a sentence that says why not).
    """
    loader: Any = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    batches = (trainer.num_test_batches if trainer.testing else trainer.num_val_batches)[0]
    none = f"{split}: no comparison with gzip and xz, because"
    if not isinstance(order := getattr(loader, "sampler", None), HeldOutOrder):
        return {}, f"{none} the loader is not that of lit_llm.data.TokenDataModule"
    tokenizer, sizes = data.tokenizer, data.corpus.token_bytes_of(split)
    if tokenizer is None:
        return {}, f"{none} the data have no tokenizer, so the bytes of their text are not known (--data.tokenizer)"
    read = int(min(len(loader.dataset), batches * order.batch_size * order.num_replicas))
    blocks, most = np.arange(read), max(SAMPLE_PARTS, SAMPLE_TOKENS // data.block_size)
    if read > most:
        blocks = np.concatenate([part[: most // SAMPLE_PARTS] for part in np.array_split(blocks, SAMPLE_PARTS)])
    batch = loader.dataset[blocks]
    targets = batch["targets"].numpy()  # (B, T)
    if "sources" in batch:  # the text of each source in one piece
        targets = targets[np.argsort(batch["sources"].numpy(), kind="stable")]
    ignored = targets < 0
    if (ignored[:, :-1] & ~ignored[:, 1:]).any():  # padding comes last
        return {}, f"{none} only a part of the text is predicted, and the model is given the rest"
    ids = targets[~ignored]
    ids = ids[sizes.numpy()[ids] > 0]  # without ids that have no text, such as the end of a document
    text, size = tokenizer.decode(ids).encode(), float(sizes.numpy()[ids].sum())
    if not text or abs(len(text) - size) > max(8, 0.01 * size):  # the text may begin or end inside a character
        return {}, f"{none} the tokenizer gives {len(text):,} bytes back of {size:,.0f}"
    packed = {"gzip": gzip.compress(text, 9), "xz": lzma.compress(text)}
    part = "" if len(blocks) == read else f", a sample in {SAMPLE_PARTS} parts"
    row = {f"{split}/{name}_bits_per_byte": 8 * len(content) / len(text) for name, content in packed.items()}
    return row, f"{split}: gzip and xz compressed {len(text):,} bytes of the same text{part}"
