"""The transformer block.

Shape letters: B sequences, T positions, d ``n_embd``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.attention import Visibility
from lit_llm.models.cache import LayerCache
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import SITES, Drops, drop
from lit_llm.models.experts import Experts
from lit_llm.models.latent_attention import LatentAttention
from lit_llm.models.mlp import MLP
from lit_llm.models.rotary import Rotation
from lit_llm.models.router import RouterSums
from lit_llm.models.self_attention import Attention
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.models.small_layers import make_norm


class Block(nn.Module):
    """A transformer block: attention and MLP, each added to the residual stream. The MLP may be a mixture of experts.

    With `norm_position` pre: x + attention(norm(x)), then x + mlp(norm(x)). post: x + norm(attention(x)). sandwich:
    x + norm(attention(norm(x))). With `parallel_residual`: x + attention(norm(x)) + mlp(norm(x)), each with its own norm.

    Args:
        experts: whether the block has a mixture of experts instead of an MLP.
        ahead: whether the block is for multi-token prediction, and gets the embeddings of later tokens as a further input.
    """

    def __init__(self, config: GPTConfig, *, experts: bool = False, ahead: bool = False) -> None:
        super().__init__()
        self.ahead = AheadInput(config) if ahead else None
        self.residual_scale, self.parallel_residual = config.residual_scale, config.parallel_residual
        before, after = config.norm_position in ("pre", "sandwich"), config.norm_position in ("post", "sandwich")
        self.attention_norm = make_norm(config) if before else None
        self.attention = Attention(config) if config.latent is None else LatentAttention(config)
        self.attention_output_norm = make_norm(config) if after else None
        self.mlp_norm = make_norm(config) if before else None
        self.mlp: MLP | Experts = Experts(config) if experts else MLP(config)
        self.mlp_output_norm = make_norm(config) if after else None
        self.attention_convolution = self.mlp_convolution = None
        if (positions := config.input_convolution) is not None:
            self.attention_convolution = ShortConvolution(positions, config.n_embd)
            self.mlp_convolution = ShortConvolution(positions, config.n_embd)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        see: Visibility,
        cache: LayerCache | None = None,
        drops: Drops | None = None,
        counted: Tensor | None = None,
        later: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, RouterSums]:
        """Apply the block: (B, T, d) → (B, T, d). Other arguments as in `Attention.forward`.

        Args:
            counted: (B, T) bool, the positions whose targets count. A block with experts then also returns its router's sums
                over these positions. The block does not store sums, so a recomputation counts no token twice. None: no sums.
            later: (B, T, d), the embeddings of later tokens. Only a block with `ahead` takes this argument.
        """
        if self.ahead is not None:
            x = self.ahead(x, later)
        # The input of a branch is assigned to no variable, which would keep its memory until the branch ends.
        y = self.attention(_input(x, self.attention_norm, self.attention_convolution, see, cache), rotation, see, cache, drops)
        y = drop(_normed(y, self.attention_output_norm), self.dropout, drops, SITES.index("attention.output"))
        after_attention = self._add(x, y)
        stream = x if self.parallel_residual else after_attention
        sums: RouterSums | None = None
        if isinstance(self.mlp, Experts):
            y, sums = self.mlp(_input(stream, self.mlp_norm, self.mlp_convolution, see, cache), drops, counted)
        else:
            y = self.mlp(_input(stream, self.mlp_norm, self.mlp_convolution, see, cache), drops)
        y = drop(_normed(y, self.mlp_output_norm), self.dropout, drops, SITES.index("mlp.output"))
        out = self._add(after_attention, y)
        return out if sums is None else (out, sums)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + (branch if self.residual_scale == 1.0 else self.residual_scale * branch)


class AheadInput(nn.Module):
    """Computes the input of a block for multi-token prediction: W [norm(h); norm(e)], with the previous block's output h and
    the embedding e of the last known token (DeepSeek-V3, arXiv 2412.19437, equation 21)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.hidden_norm, self.embedding_norm = make_norm(config), make_norm(config)
        self.weight = nn.Parameter(torch.empty(config.n_embd, 2 * config.n_embd))

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Combine the previous block's output x and the embeddings `later` of later tokens: (B, T, d) twice → (B, T, d)."""
        return F.linear(torch.cat((self.hidden_norm(x), self.embedding_norm(later)), dim=-1), differentiable_part(self.weight))


def _input(
    x: Tensor, norm: nn.Module | None, convolution: nn.Module | None, see: Visibility, cache: LayerCache | None
) -> Tensor:
    """Return the input of attention or the MLP: the residual stream after norm and convolution, if the block has them."""
    y = _normed(x, norm)
    return y if convolution is None else convolution(y, see.documents, cache, see.shard)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
