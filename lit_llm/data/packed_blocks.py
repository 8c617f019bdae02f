"""Blocks of whole documents, as a stored plan puts them together."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_llm.core.errors import UserError
from lit_llm.data.blocks import Rows, StreamBlocks
from lit_llm.data.pack_plan import PackPlan
from lit_llm.data.token_stream import TokenStream


class PackedBlocks(StreamBlocks):
    """The blocks of a plan. What documents leave of a block is padding: it has no targets, and is a document of its own.

    Args:
        plan: made for this stream and block size.
        kwargs: the arguments of ``StreamBlocks``.
    """

    _random = True

    def __init__(self, stream: TokenStream, plan: PackPlan, **kwargs: Any) -> None:
        super().__init__(stream, **kwargs)
        assert plan.size == self.block_size
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def rows(self, blocks: np.ndarray) -> Rows:
        rows = self._padding(len(blocks))
        for row, block in enumerate(blocks.tolist()):
            at = 0
            for number, (start, pairs) in enumerate(self.plan.block(block).tolist()):
                if start + pairs >= len(self.stream):
                    raise UserError(f"{self.plan.path} is damaged: delete it, and the next run makes it again.")
                place = row, slice(at, at + pairs)
                self._read_pairs(start, rows.input_ids[place], rows.targets[place])
                if rows.documents is not None:
                    rows.documents[place] = number
                at += pairs
            if rows.documents is not None:
                rows.documents[row, at:] = self.block_size
        return rows
