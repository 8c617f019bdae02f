"""The transformer block and its MLP.

Shape letters: B sequences, T positions, d ``n_embd``, f hidden width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.attention import Visibility
from lit_llm.models.cache import LayerCache
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import SITES, Drops, apply_linear, drop
from lit_llm.models.rotary import Rotation
from lit_llm.models.self_attention import Attention
from lit_llm.models.small_layers import ShortConvolution, make_norm


class MLP(nn.Module):
    """Two matrices around a nonlinearity, or three with a gate."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind, self.gelu_approximate = config.mlp, config.resolved_gelu_approximate
        bias = config.has_bias("mlp")
        self.up = nn.Linear(config.n_embd, config.hidden_width, bias=bias)
        self.gate = nn.Linear(config.n_embd, config.hidden_width, bias=bias) if config.gated else None
        self.project = nn.Linear(config.hidden_width, config.n_embd, bias=bias)
        self.unit_probe: Callable[[Tensor], None] | None = None  # set by `HealthSignals` while it measures

    def forward(self, x: Tensor, drops: Drops | None = None) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        up = apply_linear(self.up, x, drops)  # (B, T, f)
        hidden = self._activate(up) if self.gate is None else self._activate(apply_linear(self.gate, x, drops)) * up
        if self.unit_probe is not None:
            self.unit_probe(hidden)
        return apply_linear(self.project, hidden, drops)

    def _activate(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return F.silu(x)
        if self.kind == "relu2":
            y = F.relu(x)
            return y * y  # autocast on a GPU would compute a square in fp32
        return F.gelu(x, approximate=self.gelu_approximate)


class Block(nn.Module):
    """A transformer block: attention and MLP, each added to the residual stream.

    With `norm_position` pre: x + attention(norm(x)), then x + mlp(norm(x)). post: x + norm(attention(x)). sandwich:
    x + norm(attention(norm(x))). With `parallel_residual`: x + attention(norm(x)) + mlp(norm(x)), each with its own norm.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.residual_scale, self.parallel_residual = config.residual_scale, config.parallel_residual
        before, after = config.norm_position in ("pre", "sandwich"), config.norm_position in ("post", "sandwich")
        self.attention_norm = make_norm(config) if before else None
        self.attention = Attention(config)
        self.attention_output_norm = make_norm(config) if after else None
        self.mlp_norm = make_norm(config) if before else None
        self.mlp = MLP(config)
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
    ) -> Tensor:
        """(B, T, d) → (B, T, d). Arguments as in `Attention.forward`."""
        # A name for the input of a branch would keep its memory until the branch ends.
        y = self.attention(_input(x, self.attention_norm, self.attention_convolution, see, cache), rotation, see, cache, drops)
        y = drop(_normed(y, self.attention_output_norm), self.dropout, drops, SITES.index("attention.output"))
        after_attention = self._add(x, y)
        stream = x if self.parallel_residual else after_attention
        y = self.mlp(_input(stream, self.mlp_norm, self.mlp_convolution, see, cache), drops)
        y = drop(_normed(y, self.mlp_output_norm), self.dropout, drops, SITES.index("mlp.output"))
        return self._add(after_attention, y)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + (branch if self.residual_scale == 1.0 else self.residual_scale * branch)


def _input(
    x: Tensor, norm: nn.Module | None, convolution: nn.Module | None, see: Visibility, cache: LayerCache | None
) -> Tensor:
    """What attention or the MLP reads of the residual stream."""
    y = _normed(x, norm)
    return y if convolution is None else convolution(y, see.documents, cache)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
