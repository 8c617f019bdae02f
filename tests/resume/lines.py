"""A data module of a user, as in docs/own-data.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.data import Bytes, Corpus, ShardWriter, TokenDataModule, TokenStream


class Lines(TokenDataModule):
    def __init__(self, *, path: str, **batches: Any) -> None:
        super().__init__(**batches)
        self.path, self.bytes = Path(path), Bytes()

    def prepare_data(self) -> None:
        lines = self.path.read_text().splitlines()
        for name, chosen in (("val", lines[::4]), ("train", lines)):
            with ShardWriter(self.path.parent, "lines_" + name, vocab_size=257, shard_tokens=10**8) as shards:
                for line in chosen:
                    shards.write(np.append(self.bytes.encode(line), self.bytes.eos_id))

    def open_corpus(self) -> Corpus:
        streams = {name: TokenStream(sorted(self.path.parent.glob(f"lines_{name}_*.bin"))) for name in ("train", "val")}
        return Corpus(streams, self.bytes.vocab_size, self.bytes)
