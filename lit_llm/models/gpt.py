"""The GPT: MLP, block and model. Its attention is in `attention`, its settings are in `config`.

Shape letters: B sequences, T positions in the input, S positions in the keys, d ``n_embd``, H query heads, K key/value heads,
h ``head_dim``, f MLP width, V vocabulary, P vocabulary padded to a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.dtensor import draw_
from lit_llm.errors import UserError
from lit_llm.models.attention import Attention, KVCache, LayerCache, scale_rope_frequencies
from lit_llm.models.config import GPTConfig
from lit_llm.models.loss import LossSums, VocabularyShards, cross_entropy, logits

__all__ = ["GPT", "MLP", "Attention", "Block", "GPTConfig", "KVCache"]

LossFunction = Callable[..., LossSums]


class MLP(nn.Module):
    """Two matrices around a nonlinearity, or three with a gate."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        gated = config.mlp in ("swiglu", "geglu")
        self.up = nn.Linear(config.n_embd, config.hidden_width, bias=config.bias)
        self.gate = nn.Linear(config.n_embd, config.hidden_width, bias=config.bias) if gated else None
        self.project = nn.Linear(config.hidden_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        up = self.up(x)  # (B, T, f)
        if self.gate is not None:
            act = F.silu if self.kind == "swiglu" else F.gelu
            return self.project(act(self.gate(x)) * up)
        # GPT-2's GELU is the tanh approximation.
        return self.project(F.gelu(up, approximate="tanh") if self.kind == "gelu" else F.relu(up).square())


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, d) → (B, T, d). Arguments as in `Attention.forward`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class GPT(nn.Module):
    """Decoder-only transformer.

    Raises:
        UserError: if the configuration is invalid; the message lists every reason.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.vocabulary_shards: VocabularyShards | None = None  # set if the vocabulary is split over ranks
        problems = config.problems()
        if config.vocab_size is None:
            problems.append("model.vocab_size is null, and there is no data to take it from (--model.vocab_size)")
        if problems:
            raise UserError("\n".join(problems))
        self.config = config
        device = torch.get_default_device()
        # Build on the meta device, then initialise. The random draws then do not depend on the device, and torch's default
        # initialisation is skipped.
        with torch.device("meta"):
            self._build(config)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _build(self, config: GPTConfig) -> None:
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        # A tied head is not a module, so that the matrix is one parameter and is counted, sharded and saved once.
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.position == "rope":
            table = torch.empty(config.block_size, config.resolved_head_dim // 2, dtype=torch.float32)
            self.register_buffer("rope_cos", table, persistent=False)
            self.register_buffer("rope_sin", table.clone(), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """(Re)initialise all parameters and buffers. Required after `to_empty` of a model built on the meta device."""
        config = self.config
        assert config.vocab_size is not None
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = config.residual_std if name.endswith(".project") else config.init_std
                draw_(module.weight, partial(nn.init.normal_, std=std))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                draw_(module.weight, partial(nn.init.normal_, std=config.init_std))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
        # The normalised residual stream has norm sqrt(d). So logits have variance d * std^2, and the first loss is
        # ln V + d * std^2 / 2. Up to a width of about 1,000, std is GPT-2's 0.02. Wider models get a smaller std, so that the
        # first loss is within 2 % of ln V.
        head_std = min(config.init_std, math.sqrt(0.04 * math.log(max(config.vocab_size, 2)) / config.n_embd))
        draw_(self.embedding.weight if self.head is None else self.head.weight, partial(nn.init.normal_, std=head_std))
        self._fill_rotation()

    def _fill_rotation(self) -> None:
        """Fill the cos and sin tables of the (T, h/2) rotary angles."""
        config = self.config
        if config.position == "rope":
            half = config.resolved_head_dim // 2
            device = self.rope_cos.device
            frequency = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)  # (h/2,)
            if config.rope_scaling is not None:
                frequency = scale_rope_frequencies(frequency, **config.rope_scaling)
            position = torch.arange(config.block_size, device=device, dtype=torch.float32)  # (T,)
            angle = torch.outer(position, frequency)  # (T, h/2)
            self.rope_cos.copy_(angle.cos())
            self.rope_sin.copy_(angle.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        # `model.to(torch.bfloat16)` must not round the tables: position 4,001 would get the angle of 4,000.
        super()._apply(fn, recurse)
        if self.config.position == "rope" and self.rope_cos.dtype != torch.float32:
            self.rope_cos, self.rope_sin = self.rope_cos.float(), self.rope_sin.float()
            if not self.rope_cos.is_meta:
                self._fill_rotation()
        return self

    @property
    def head_weight(self) -> Tensor:
        """(P, d): the output matrix. With a split vocabulary it is this rank's (P / ranks, d) rows."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loss: LossFunction = cross_entropy,
        cache: KVCache | None = None,
    ) -> Tensor | LossSums:
        """Logits, or with targets the sums of the loss. The head runs inside forward, where FSDP gathers a sharded head.

        Args:
            input_ids: (B, T) int64, T at most block_size (cached positions included).
            targets: (B, T) int64, the id that follows each position; -100 is ignored.
            loss: `lit_llm.models.loss.cross_entropy`, or `chunked_cross_entropy`, with settings bound by `functools.partial`.
            cache: keys and values of the positions before these; extended in place.

        Returns:
            (B, T, V) fp32 logits without targets, else `LossSums` over all counted targets.
        """
        config = self.config
        assert config.vocab_size is not None
        start = 0 if cache is None else cache.length
        length = input_ids.size(1)
        assert start + length <= config.block_size, f"{start + length} positions > block_size {config.block_size}"
        shards = self.vocabulary_shards
        if shards is not None:
            assert cache is None, "a cache does not work with tensor parallelism, which splits positions over ranks"
            # Ranks need equal parts of the sequence. Attention is causal, so padding at the end affects no other position.
            input_ids = F.pad(input_ids, (0, -length % shards.group.size()))
        x = self.embedding(input_ids)  # (B, T, d); under tensor parallelism (B, T / ranks, d) until the last norm
        if self.positions is not None:
            x = x + self.positions(torch.arange(start, start + input_ids.size(1), device=input_ids.device)[None])  # (1, T, d)
        x = self.dropout(x)
        rotation = None
        if config.position == "rope":
            rotation = self.rope_cos[start : start + input_ids.size(1)], self.rope_sin[start : start + input_ids.size(1)]
        mask = self.attention_mask(input_ids if cache is None else cache.remember(input_ids), start)
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, mask, None if cache is None else cache.layers[i])
        x = self.norm(x)
        if x.size(1) > length:
            x = x[:, :length]
        if targets is None:
            return logits(x, self.head_weight, vocab_size=config.vocab_size, softcap=config.logit_softcap, shards=shards)
        return loss(x, self.head_weight, targets, vocab_size=config.vocab_size, softcap=config.logit_softcap, shards=shards)

    def attention_mask(self, seen_ids: Tensor, start: int) -> Tensor | None:
        """True where a query may attend to a key. None: causal attention, or a single query without a window, needs no mask.

        Args:
            seen_ids: (B, S) int64, all ids so far. The queries are the T = S - start ids from `start` on.

        Returns:
            None, or bool of shape (T, S), or (B, 1, T, S) with document masking.
        """
        config, end = self.config, seen_ids.size(1)
        windowed = config.window is not None and config.window < end
        eos_id = config.eos_id if config.mask_documents else None
        if not windowed and eos_id is None and (start == 0 or end - start == 1):
            return None
        query = torch.arange(start, end, device=seen_ids.device)[:, None]  # (T, 1)
        key = torch.arange(end, device=seen_ids.device)[None, :]  # (1, S)
        mask = key <= query  # (T, S)
        if windowed:
            assert config.window is not None
            mask = mask & (query - key < config.window)
        if eos_id is not None:
            ends = seen_ids.eq(eos_id)  # (B, S)
            document = ends.cumsum(dim=1) - ends.long()  # (B, S): an end-of-document id belongs to the document that it ends
            mask = mask & (document[:, start:, None] == document[:, None, :])[:, None]  # (B, 1, T, S)
        return mask

    def num_parameters(self) -> int:
        """Number of parameters. A tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())
