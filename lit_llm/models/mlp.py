"""The MLP of a block.

Shape letters: B sequences, T positions, d ``n_embd``, f hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops, apply_linear


class MLP(nn.Module):
    """Two matrices around a nonlinearity, or three with a gate.

    Args:
        width: f. None: the configuration's.
    """

    def __init__(self, config: GPTConfig, width: int | None = None) -> None:
        super().__init__()
        self.activate = Activation(config)
        bias, width = config.has_bias("mlp"), config.hidden_width if width is None else width
        self.up = nn.Linear(config.n_embd, width, bias=bias)
        self.gate = nn.Linear(config.n_embd, width, bias=bias) if config.gated else None
        self.project = nn.Linear(width, config.n_embd, bias=bias)
        self.unit_probe: Callable[[Tensor], None] | None = None  # set by `HealthSignals` while it measures

    def forward(self, x: Tensor, drops: Drops | None = None) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        up = apply_linear(self.up, x, drops)  # (B, T, f)
        hidden = self.activate(up) if self.gate is None else self.activate(apply_linear(self.gate, x, drops)) * up
        if self.unit_probe is not None:
            self.unit_probe(hidden)
        return apply_linear(self.project, hidden, drops)


class Activation:
    """The nonlinearity of an MLP, or of its gate, elementwise."""

    def __init__(self, config: GPTConfig) -> None:
        self.kind, self.gelu_approximate = config.mlp, config.resolved_gelu_approximate

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return F.silu(x)
        if self.kind == "relu2":
            y = F.relu(x)
            return y * y  # autocast on a GPU would compute a square in fp32
        return F.gelu(x, approximate=self.gelu_approximate)
