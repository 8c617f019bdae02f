"""A causal depthwise convolution over a few positions, also if ranks share the positions of a sequence.

Shape letters: B sequences, T positions of the whole sequence, t of this rank, c channels, n positions of the convolution,
k chunks of a rank, p positions of a piece of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.attention_ranks import gather_sequence
from lit_llm.models.cache import LayerCache
from lit_llm.models.sequence_shard import SequenceShard


class ShortConvolution(nn.Module):
    """Adds a causal depthwise convolution to its input: per channel, a weighted sum over this position and the n - 1 before it.

        y_t = x_t + Σ_i w_i x_(t - i),   i = 0 … n - 1

    Positions of other documents, and positions before the sequence, count as zero. Primer (So et al. 2021, arXiv 2109.08668)
    has the convolution without the added x_t, Canon layers (Allen-Zhu 2025) with it.

    Ranks that share a sequence send each other the last n - 1 positions of their chunks, and nothing else.
    """

    def __init__(self, positions: int, channels: int) -> None:
        super().__init__()
        self.positions, self.channels = positions, channels
        # One dimension, channel by channel: it is a vector for the optimizer, and tensor parallelism splits it by channels.
        self.weight = nn.Parameter(torch.empty(channels * positions))
        self.stream: SequenceShard | None = None
        """How tensor-parallel ranks share the positions of a context rank's input. None: each rank has all these positions."""

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Apply the convolution: (B, t, c) → (B, t, c).

        Args:
            documents: (B, T) document numbers of the whole sequence, including cached positions. None: one document.
            cache: inputs at the positions before x; extended in place. None: there are no earlier positions.
            shard: how ranks share the sequence (context parallelism). None: each rank has whole sequences.
        """
        past, batch = self.positions - 1, x.size(0)
        if cache is not None:
            all_x = cache.with_past(self, x, past)  # (B, n - 1 + T, c)
        elif shard is None and self.stream is None:
            all_x = F.pad(x, (0, 0, past, 0))
        else:  # each piece counts as a sequence
            x, before = _pieces(x, past, shard, self.stream)
            all_x = torch.cat((before, x), dim=1)  # (B·k, n - 1 + p, c)
        weight = differentiable_part(self.weight).view(-1, self.positions)  # (c, n), the newest position first
        if documents is None:
            # An image of height n - 1 + T and width 1, channels last, is a view. On a CPU its convolution is 2 to 4 times as
            # fast as that of a sequence, whose channels come before the positions (benchmarks/short_convolution.py).
            image = all_x.unsqueeze(2).permute(0, 3, 1, 2)  # (B, c, n - 1 + T, 1)
            kernel = weight.flip(1)[:, None, :, None].to(x.dtype)  # (c, 1, n, 1)
            y = x + F.conv2d(image, kernel, groups=x.size(2)).permute(0, 2, 3, 1).squeeze(2)
            return y.reshape(batch, -1, y.size(2))
        # These sums are in the type of x, also under autocast, which computes the convolution above in the narrow type.
        weight = weight.t().to(x.dtype).contiguous()  # (n, c)
        y = x * (1 + weight[0])
        for i in range(1, self.positions):
            earlier = all_x[:, past - i : past - i + x.size(1)]
            same = _in_same_document(documents, i)  # (B, T, 1)
            if cache is not None:
                same = same[:, -x.size(1) :]
            if shard is not None:
                same = shard.take(same)
            if self.stream is not None:
                same = self.stream.take(same)
            y = torch.addcmul(y, earlier * same.reshape(len(x), -1, 1), weight[i])
        return y.reshape(batch, -1, y.size(2))


def _in_same_document(documents: Tensor, lag: int) -> Tensor:
    """(B, T, 1) bool: whether position t - `lag` is in the same document as position t."""
    same = documents[:, lag:] == documents[:, :-lag]
    return F.pad(same, (min(lag, documents.size(1)), 0))[..., None]


def _pieces(x: Tensor, count: int, context: SequenceShard | None, stream: SequenceShard | None) -> tuple[Tensor, Tensor]:
    """Return this rank's k contiguous pieces and the positions before each piece: (B, t, c) → (B·k, p, c), (B·k, count, c).

    A piece is a chunk, or with `stream` a part of a chunk. Positions before the start of the sequence are zeros. First the
    ranks of `stream` gather the last positions of all pieces of their k chunks, then the ranks of `context` gather the last
    positions of all chunks. Pieces shorter than `count` are gathered whole, so that no position before a piece is missing.

    Args:
        context: how context ranks share the sequence: each rank has k chunks. None: k is 1, the chunk is the whole sequence.
        stream: how tensor-parallel ranks share a context rank's k chunks: each rank has k consecutive pieces. None: pieces are
            whole chunks.
    """
    k = 1 if context is None else len(context.chunks)
    ranks, first = (1, 0) if stream is None else (stream.ranks, stream.rank * k)
    pieces = x.unflatten(1, (k, -1))  # (B, k, p, c)
    of_piece = min(count, pieces.size(2))
    ends = pieces[:, :, pieces.size(2) - of_piece :].flatten(1, 2)[:, None]  # (B, 1, k·of_piece, c)
    if stream is not None:
        ends = gather_sequence(ends, stream)
    by_chunk = ends[:, 0].unflatten(1, (k, -1))  # (B, k, ranks·of_piece, c): the ends of each chunk's pieces
    chunks_before = x.new_empty(x.size(0), 0, x.size(2))
    of_chunk = min(count, by_chunk.size(2))
    if context is not None:
        chunk_ends = by_chunk[:, :, by_chunk.size(2) - of_chunk :].flatten(1, 2)[:, None]  # (B, 1, k·of_chunk, c)
        chunks_before = gather_sequence(chunk_ends, context)[:, 0]  # (B, multiple·of_chunk, c), of all chunks
    before = []
    for piece in range(first, first + k):
        chunk, place = divmod(piece, ranks)
        number = 0 if context is None else context.chunks[chunk]
        known = torch.cat((chunks_before[:, : number * of_chunk], by_chunk[:, chunk, : place * of_piece]), dim=1)
        known = known[:, max(0, known.size(1) - count) :]
        before.append(F.pad(known, (0, 0, count - known.size(1), 0)))
    return pieces.flatten(0, 1), torch.stack(before, dim=1).flatten(0, 1)
