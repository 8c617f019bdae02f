"""One GPT, by configuration: GPT-2, LLaMA, Mistral and the modern small-model recipe are settings of it, never names.

Read top to bottom: the configuration, the pieces of a block, the model, the cache for generation.

Shape letters: B sequences, T positions in the input, S positions in the keys, d ``n_embd``, H heads, K key/value heads,
h head width, V vocabulary, P vocabulary padded to a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.dtensor import draw_
from lit_llm.errors import UserError
from lit_llm.models.loss import LossSums, VocabularyShards, cross_entropy, logits

LossFunction = Callable[..., LossSums]


@dataclass
class GPTConfig:
    """What the model is. The defaults are the recipe that learns most per token at small scale (see docs/measurements.md)."""

    n_layer: int = 6
    """Number of blocks."""
    n_head: int = 6
    """Number of query heads; must divide n_embd unless head_dim is given."""
    n_kv_head: int | None = None
    """Number of key/value heads; must divide n_head. None: as many as n_head (multi-head), fewer: grouped-query attention."""
    n_embd: int = 384
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one head. None: n_embd / n_head."""
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
    original_max_position_embeddings. None: as they are."""
    bias: bool = False
    """Biases in every linear layer of the blocks, and in LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values (Qwen2 has only these). None: as bias says."""
    tie_embeddings: bool = False
    """One matrix for the token embedding and the output head."""
    dropout: float = 0.0
    """Probability of dropping embeddings, attention weights and residual updates in training."""
    qk_norm: bool = True
    """RMSNorm with a gain on each head's queries and keys, before the rotary embedding."""
    window: int | None = None
    """Sliding window: a position sees itself and the window - 1 before it. None: everything before it."""
    logit_softcap: float | None = None
    """c: logits become c * tanh(logits / c). None: left as they are."""
    pad_vocab_to: int = 64
    """The embedding and head have vocab_size rounded up to a multiple of this; padded ids are never predicted, cost no loss."""
    init_std: float = 0.02
    """Standard deviation of the initial weights (GPT-2)."""
    zero_init_projections: bool | None = None
    """True: blocks start as the identity, both projections into the residual stream are zero. False: their std is
    init_std / sqrt(2 * n_layer) (GPT-2). Null: true unless embeddings are tied, where the identity would predict its input."""
    mask_documents: bool = False
    """Attention does not cross the end-of-document id."""
    eos_id: int | None = None
    """End-of-document id. None: follows the data's tokenizer."""

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_width(self) -> int:
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
        """Every reason why this model cannot be built, one sentence each; empty when it can."""
        found = []
        for name in ("n_layer", "n_head", "n_embd", "block_size", "pad_vocab_to"):
            if getattr(self, name) < 1:
                found.append(f"model.{name} is {getattr(self, name)}, it must be at least 1 (--model.{name})")
        for name in ("n_kv_head", "head_dim", "mlp_width", "window", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"model.{name} is {value}, it must be at least 1 or null (--model.{name})")
        if found:
            return found  # the rules below divide by these
        if self.head_dim is None and self.n_embd % self.n_head:
            near = _nearest_divisors(self.n_embd, self.n_head)
            found.append(
                f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; "
                f"nearest that do: {near} (--model.n_head, --model.n_embd or --model.head_dim)"
            )
        elif self.position == "rope" and self.head_width % 2:
            found.append(
                f"rotary positions need an even head width, this one is {self.head_width} "
                "(--model.head_dim, --model.n_head, --model.n_embd or --model.position learned)"
            )
        if self.n_head % self.kv_heads:
            near = _nearest_divisors(self.n_head, self.kv_heads)
            found.append(
                f"model.n_kv_head={self.kv_heads} does not divide model.n_head={self.n_head}; "
                f"nearest that do: {near} (--model.n_kv_head)"
            )
        if self.tie_embeddings and self.zero_init_projections:
            found.append(
                "model.zero_init_projections with model.tie_embeddings would start by predicting its own input "
                "(--model.zero_init_projections null, or --model.tie_embeddings false)"
            )
        if not 0.0 <= self.dropout < 1.0:
            found.append(f"model.dropout is {self.dropout}, it must be at least 0 and below 1 (--model.dropout)")
        for name in ("norm_eps", "rope_theta", "init_std"):
            if not getattr(self, name) > 0:
                found.append(f"model.{name} is {getattr(self, name)}, it must be above 0 (--model.{name})")
        if self.rope_scaling is not None:
            found += _rope_scaling_problems(self.rope_scaling)
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            found.append(f"model.logit_softcap is {self.logit_softcap}, it must be above 0 or null (--model.logit_softcap)")
        return found

    def flops_per_token(self, length: int | None = None) -> float:
        """Training FLOPs per token: 6 * N_matmul + 12 * L * H * h * min(T, window), full-attention convention.

        H * h is d unless head_dim says otherwise. N_matmul counts every matrix that multiplies (a tied head once, embedding
        look-ups not); forward is a third of it.
        Source: Kaplan et al. 2020 (6N) and PaLM, appendix B (attention term).
        """
        length = self.block_size if length is None else length
        span = length if self.window is None else min(length, self.window)
        gated = 3 if self.mlp in ("swiglu", "geglu") else 2
        attention = 2 * self.n_embd * self.head_width * (self.n_head + self.kv_heads)
        n_matmul = self.n_layer * (attention + gated * self.n_embd * self.hidden_width)
        n_matmul += self.padded_vocab_size * self.n_embd
        return 6.0 * n_matmul + 12.0 * self.n_layer * self.n_head * self.head_width * span


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    return ", ".join(str(k) for k in sorted(sorted(divisors, key=lambda k: abs(k - wanted))[:3]))


_ROPE_SCALING = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _rope_scaling_problems(scaling: dict[str, float]) -> list[str]:
    if scaling.keys() != _ROPE_SCALING:
        return [f"model.rope_scaling has {sorted(scaling)}, it must have {sorted(_ROPE_SCALING)} (--model.rope_scaling)"]
    if min(scaling.values()) <= 0 or scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        return [
            f"model.rope_scaling is {scaling}: all must be above 0, and high_freq_factor above low_freq_factor "
            "(--model.rope_scaling)"
        ]
    return []


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, through torch's scaled_dot_product_attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.dropout = config.dropout
        d, heads, kv = config.n_embd, config.n_head * config.head_width, config.kv_heads * config.head_width
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        # Three matrices, not one fused: Muon orthogonalises each on its own, tensor parallelism splits each by heads.
        self.query = nn.Linear(d, heads, bias=qkv_bias)
        self.key = nn.Linear(d, kv, bias=qkv_bias)
        self.value = nn.Linear(d, kv, bias=qkv_bias)
        self.project = nn.Linear(heads, d, bias=config.bias)
        self.query_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        # x: (B, T, d); mask: broadcastable to (B, H, T, S), True where attention is allowed; None means plain causal
        batch, length, _ = x.shape
        # The number of heads is inferred (-1): under tensor parallelism each rank holds a part of them.
        q = self.query_norm(self.query(x).view(batch, length, -1, self.head_width)).transpose(1, 2)  # (B, H, T, h)
        k = self.key_norm(self.key(x).view(batch, length, -1, self.head_width)).transpose(1, 2)  # (B, K, T, h)
        v = self.value(x).view(batch, length, -1, self.head_width).transpose(1, 2)  # (B, K, T, h)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms return fp32; attention runs in the compute dtype
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and length > 1,  # one new token may see the whole cache
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )  # (B, H, T, h)
        return self.project(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), half-split: pair (i, i + h/2) turns by its position's angle.

    Args:
        x: (B, heads, T, h) queries or keys.
        cos, sin: (T, h/2) fp32.
    """
    first, second = x.chunk(2, dim=-1)  # (B, heads, T, h/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def scale_rope_frequencies(
    frequency: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's rotary frequencies for a context `factor` times the original one (Grattafiori et al. 2024, released code).

    Frequencies that turn more than `high_freq_factor` times in the original context stay, those that turn less than
    `low_freq_factor` times are divided by `factor`, and between the two the share that stays grows linearly with the turns.

    Args:
        frequency: (h/2,) radians per position.
    """
    turns = frequency * original_max_position_embeddings / (2 * math.pi)  # (h/2,)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


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
        up = self.up(x)
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
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class GPT(nn.Module):
    """Decoder-only transformer.

    Raises:
        UserError: the configuration cannot be built; every reason in one message.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.vocabulary_shards: VocabularyShards | None = None  # set where the vocabulary is split over ranks
        problems = config.problems()
        if config.vocab_size is None:
            problems.append("model.vocab_size is null and no data gave it (--model.vocab_size)")
        if problems:
            raise UserError("\n".join(problems))
        self.config = config
        device = torch.get_default_device()
        # Built without memory, then given some and initialised: the draws are the same whatever device it is built on, and
        # torch's own initialisation, which would be overwritten, is never computed.
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
        # A tied head is no module of its own, so that the matrix is one parameter and is counted, sharded and saved once.
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.position == "rope":
            table = torch.empty(config.block_size, config.head_width // 2, dtype=torch.float32)
            self.register_buffer("rope_cos", table, persistent=False)
            self.register_buffer("rope_sin", table.clone(), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """(Re)initialise everything, buffers too: also what a model built on the meta device calls once it has memory."""
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
        # The normed stream has length sqrt(d), so logits have variance d * std^2 and the first loss is ln V + d * std^2 / 2.
        # GPT-2's 0.02 stays as it is up to a width of about 1,000; wider ones are capped to start within 2 % of ln V.
        head_std = min(config.init_std, math.sqrt(0.04 * math.log(max(config.vocab_size, 2)) / config.n_embd))
        draw_(self.embedding.weight if self.head is None else self.head.weight, partial(nn.init.normal_, std=head_std))
        self._fill_rotation()

    def _fill_rotation(self) -> None:
        """Fill the tables of cos and sin of (T, h/2) angles."""
        config = self.config
        if config.position == "rope":
            half = config.head_width // 2
            device = self.rope_cos.device
            frequency = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)  # (h/2,)
            if config.rope_scaling is not None:
                frequency = scale_rope_frequencies(frequency, **config.rope_scaling)
            position = torch.arange(config.block_size, device=device, dtype=torch.float32)  # (T,)
            angle = torch.outer(position, frequency)  # (T, h/2)
            self.rope_cos.copy_(angle.cos())
            self.rope_sin.copy_(angle.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        # `model.to(torch.bfloat16)` is for weights: an angle of position 4,001 in bf16 would be that of 4,000.
        super()._apply(fn, recurse)
        if self.config.position == "rope" and self.rope_cos.dtype != torch.float32:
            self.rope_cos, self.rope_sin = self.rope_cos.float(), self.rope_sin.float()
            if not self.rope_cos.is_meta:
                self._fill_rotation()
        return self

    @property
    def head_weight(self) -> Tensor:
        """(P, d): the matrix that turns the normed stream into logits; with a split vocabulary, this rank's rows of it."""
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
        """Logits, or the sums that a loss is made of: the head runs inside forward, where a sharded head is gathered.

        Args:
            input_ids: (B, T) int64, T at most block_size (cached positions included).
            targets: (B, T) int64, the id that follows each position; -100 is not counted.
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
            assert cache is None, "a split model has no cache: its positions are spread over the ranks"
            # Ranks have equal parts of the sequence; what is added at its end is seen by nobody before.
            input_ids = F.pad(input_ids, (0, -length % shards.group.size()))
        x = self.embedding(input_ids)  # (B, T, d); with tensor parallelism (B, T / ranks, d) from here to the last norm
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
        """True where a query may look at a key; None where plain causal attention (or one query, no window) says it all.

        Args:
            seen_ids: (B, S) int64, every id so far; the queries are those from `start` on, T = S - start.

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
            document = ends.cumsum(dim=1) - ends.long()  # (B, S): an end-of-document id belongs to what it ends
            mask = mask & (document[:, start:, None] == document[:, None, :])[:, None]  # (B, 1, T, S)
        return mask

    def num_parameters(self) -> int:
        """Parameters, a tied matrix once."""
        return sum(p.numel() for p in self.parameters())


class LayerCache:
    """Keys and values of one layer, (B, K, capacity, h), filled from the left."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, h) new keys and values; return all so far as (B, K, S, h) views."""
        if self.keys is None or self.values is None:
            shape = (k.size(0), k.size(1), self.capacity, k.size(3))
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """One `LayerCache` a block, and the ids themselves: generation computes each position once.

    Args:
        capacity: positions there is room for. None: block_size, which imported models have up to 131,072 of.
    """

    def __init__(self, config: GPTConfig, capacity: int | None = None) -> None:
        self.layers = [LayerCache(config.block_size if capacity is None else capacity) for _ in range(config.n_layer)]
        self.seen_ids: Tensor | None = None

    @property
    def length(self) -> int:
        return self.layers[0].length

    def remember(self, input_ids: Tensor) -> Tensor:
        """Append (B, T) new ids; return all of them, (B, S)."""
        self.seen_ids = input_ids if self.seen_ids is None else torch.cat((self.seen_ids, input_ids), dim=1)
        return self.seen_ids
