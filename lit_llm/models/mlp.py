"""The MLP of a block.

Shape letters: B sequences, T positions, d ``n_embd``, f hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops, apply_linear

CLAMP, SIGMOID_GAIN = 7.0, 1.702
"""Constants of `clamped_swiglu` (GPT-OSS, arXiv 2508.10925): g σ(1.702 g) (1 + clamp(up, ±7)) with g = min(gate, 7)."""


class MLP(nn.Module):
    """The MLP of a block: two matrices `up` and `project` with a nonlinearity between them, and with `gated` a third, `gate`.

    Args:
        width: hidden width f. None: the width of the configuration.
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
        """Apply the MLP: (B, T, d) → (B, T, d)."""
        up = apply_linear(self.up, x, drops)  # (B, T, f)
        if self.gate is None:
            hidden = self.activate(up)
        else:  # in one expression, so that nothing keeps the gate's output
            hidden = self.activate(apply_linear(self.gate, x, drops)) * self.activate.gated(up)
        if self.unit_probe is not None:
            self.unit_probe(hidden)
        return apply_linear(self.project, hidden, drops)


class Activation:
    """Callable that applies the elementwise nonlinearity which `config.mlp` names, to an MLP's hidden units or to its gate."""

    def __init__(self, config: GPTConfig) -> None:
        self.kind, self.gelu_approximate = config.mlp, config.resolved_gelu_approximate

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return F.silu(x)
        if self.kind == "clamped_swiglu":
            x = x.clamp(max=CLAMP)
            return x * (SIGMOID_GAIN * x).sigmoid()
        if self.kind == "relu2":
            y = F.relu(x)
            return y * y  # autocast on a GPU would compute a square in fp32
        return F.gelu(x, approximate=self.gelu_approximate)

    def gated(self, up: Tensor) -> Tensor:
        """Return the tensor by which the activated gate is multiplied: `up`, or clamp(up, ±7) + 1 in `clamped_swiglu`."""
        return up.clamp(-CLAMP, CLAMP) + 1 if self.kind == "clamped_swiglu" else up
