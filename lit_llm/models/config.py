"""The configuration of a GPT. GPT-2, LLaMA, Mistral and others are settings of it; the code never reads a model's name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_llm.number_domain import Domain, above, below, whole

MODEL_DOMAINS: dict[str, Domain] = {
    "n_layer": whole(1, 4096),
    "n_head": whole(1, 100_000),
    "n_kv_head": whole(1, 100_000, null=True),
    "n_embd": whole(1, 1_000_000),
    "head_dim": whole(1, 65_536, null=True),
    "block_size": whole(1, 1_000_000_000),
    "vocab_size": whole(1, 100_000_000, null=True),
    "mlp_width": whole(1, 10_000_000, null=True),
    "norm_eps": above(0, 1),
    "rope_theta": above(0, 10**15),
    "rope_scaling": above(0, 10**9, null=True),
    "dropout": below(0, 1),
    "window": whole(1, 1_000_000_000, null=True),
    "logit_softcap": above(0, 10**6, null=True),
    "pad_vocab_to": whole(1, 1_000_000),
    "init_std": above(0, 1000),
    "eos_id": whole(0, 100_000_000, null=True),
}
"""The domain of each number of `GPTConfig`, and of the values in `rope_scaling`. Sizes are far above those of any model."""


@dataclass
class GPTConfig:
    """The model's architecture. The defaults learn most per token at small scale (see docs/measurements.md)."""

    n_layer: int = 6
    """Number of blocks."""
    n_head: int = 6
    """Number of query heads; must divide n_embd unless head_dim is given."""
    n_kv_head: int | None = None
    """Number of key/value heads; must divide n_head. None: as many as n_head (multi-head), fewer: grouped-query attention."""
    n_embd: int = 384
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one attention head. None: n_embd / n_head."""
    block_size: int = 256
    """Longest context, in tokens."""
    vocab_size: int | None = None
    """Number of token ids. None: follows the data's tokenizer."""
    mlp: Literal["gelu", "relu2", "swiglu", "geglu"] = "relu2"
    """MLP kind; swiglu and geglu have a third matrix, the gate."""
    mlp_width: int | None = None
    """Hidden width of the MLP. None: 4 * n_embd."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: float = 1e-5
    """Epsilon of every norm."""
    position: Literal["learned", "rope"] = "rope"
    """Learned absolute positions (GPT-2) or rotary embeddings (half-split convention, as in LLaMA's Hugging Face port)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, float] | None = None
    """Llama 3.1's scaling of rotary wavelengths to a longer context: factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings. None: no scaling."""
    bias: bool = False
    """Biases in every linear layer of the blocks, and in LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values (Qwen2 has only these). None: same as bias."""
    tie_embeddings: bool = False
    """One matrix for the token embedding and the output head."""
    dropout: float = 0.0
    """Probability of dropping embeddings, attention weights and residual updates in training."""
    qk_norm: bool = True
    """RMSNorm with a gain on each head's queries and keys, before the rotary embedding."""
    window: int | None = None
    """Sliding window: a position attends to itself and the window - 1 positions before it. None: all earlier positions."""
    logit_softcap: float | None = None
    """c: logits become c * tanh(logits / c). None: no soft cap."""
    pad_vocab_to: int = 64
    """Embedding and head have vocab_size rounded up to a multiple of this. Padding ids enter neither logits nor loss."""
    init_std: float = 0.02
    """Standard deviation of the initial weights (GPT-2)."""
    zero_init_projections: bool | None = None
    """True: both projections into the residual stream start at zero, so blocks start as the identity. False: their std is
    init_std / sqrt(2 * n_layer) (GPT-2). Null: true unless embeddings are tied, because the model would predict its input."""
    mask_documents: bool = False
    """Attention does not cross the end-of-document id."""
    eos_id: int | None = None
    """End-of-document id. None: follows the data's tokenizer."""

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def resolved_head_dim(self) -> int:
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        return 4 * self.n_embd if self.mlp_width is None else self.mlp_width

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections into the residual stream."""
        zero = not self.tie_embeddings if self.zero_init_projections is None else self.zero_init_projections
        return 0.0 if zero else self.init_std / math.sqrt(2 * self.n_layer)

    @property
    def padded_vocab_size(self) -> int:
        assert self.vocab_size is not None, "vocab_size is resolved before the model is built"
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to

    def problems(self) -> list[str]:
        """Every reason why this model cannot be built, one sentence each."""
        ranges, refused = [], set()
        for name, domain in MODEL_DOMAINS.items():
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else [value]:
                if problem := domain.problem(f"model.{name}", number):
                    ranges.append(problem)
                    refused.add(name)
        if any(MODEL_DOMAINS[name].whole for name in refused):
            return ranges  # the rules below divide by these
        found = []
        if self.head_dim is None and self.n_embd % self.n_head:
            near = _nearest_divisors(self.n_embd, self.n_head)
            found.append(
                f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; "
                f"the nearest values that do are {near} (--model.n_head, --model.n_embd or --model.head_dim)"
            )
        elif self.position == "rope" and self.resolved_head_dim % 2:
            found.append(
                f"rotary positions need an even head_dim, but it is {self.resolved_head_dim} "
                "(--model.head_dim, --model.n_head, --model.n_embd or --model.position learned)"
            )
        if self.n_head % self.kv_heads:
            near = _nearest_divisors(self.n_head, self.kv_heads)
            found.append(
                f"model.n_kv_head={self.kv_heads} does not divide model.n_head={self.n_head}; "
                f"the nearest values that do are {near} (--model.n_kv_head)"
            )
        if self.tie_embeddings and self.zero_init_projections:
            found.append(
                "model.zero_init_projections with model.tie_embeddings would make the untrained model predict its own input "
                "(--model.zero_init_projections null, or --model.tie_embeddings false)"
            )
        if self.rope_scaling is not None and "rope_scaling" not in refused:
            found += _rope_scaling_problems(self.rope_scaling)
        if self.eos_id is not None and self.vocab_size is not None and self.eos_id >= self.vocab_size:
            found.append(
                f"model.eos_id is {self.eos_id}, but must be below model.vocab_size={self.vocab_size}, or null to follow the "
                "data (--model.eos_id)"
            )
        return found + ranges

    def flops_per_token(self, length: int | None = None) -> float:
        """Training FLOPs per token: 6 * N_matmul + 12 * L * H * h * min(T, window), full-attention convention.

        H * h is d unless head_dim is set. N_matmul counts every matrix in a matrix product: a tied head once, an embedding
        look-up not at all. The forward pass takes a third of the FLOPs.
        Source: Kaplan et al. 2020 (6N) and PaLM, appendix B (attention term).
        """
        length = self.block_size if length is None else length
        span = length if self.window is None else min(length, self.window)
        gated = 3 if self.mlp in ("swiglu", "geglu") else 2
        attention = 2 * self.n_embd * self.resolved_head_dim * (self.n_head + self.kv_heads)
        n_matmul = self.n_layer * (attention + gated * self.n_embd * self.hidden_width)
        n_matmul += self.padded_vocab_size * self.n_embd
        return 6.0 * n_matmul + 12.0 * self.n_layer * self.n_head * self.resolved_head_dim * span


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    return ", ".join(str(k) for k in sorted(sorted(divisors, key=lambda k: abs(k - wanted))[:3]))


_ROPE_SCALING = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _rope_scaling_problems(scaling: dict[str, float]) -> list[str]:
    if scaling.keys() != _ROPE_SCALING:
        return [f"model.rope_scaling has {sorted(scaling)}, but must have {sorted(_ROPE_SCALING)} (--model.rope_scaling)"]
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        return [
            f"model.rope_scaling is {scaling}, but it must have high_freq_factor above low_freq_factor (--model.rope_scaling)"
        ]
    return []
