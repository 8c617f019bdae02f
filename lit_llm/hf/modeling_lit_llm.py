"""The decoder of lit_llm for transformers. This file needs only torch and transformers.

Shape letters: B sequences, T positions in the input, S positions in cache and input together, d width, H heads, K heads of
keys and values, h dimensions of a head, n positions of a convolution, r rotated dimensions of a head, c channels, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


class LitLLMConfig(PretrainedConfig):
    """The model settings of lit_llm. `blocks` has one dict per block: window (positions or None), rope (bool), rope_theta."""

    model_type = "lit_llm"
    attribute_map = {  # noqa: RUF012
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        **{"num_key_value_heads": "n_kv_head", "intermediate_size": "mlp_width", "max_position_embeddings": "block_size"},
    }


SLOTS = 6
"""Number of cache entries of a block: one for keys and values, and one each for the inputs of five convolutions, those of
attention, MLP, queries, keys and values."""


class Norm(nn.Module):
    """RMSNorm if `rms`, else LayerNorm, with or without a bias, over the last dimension, whose size is `width`."""

    def __init__(self, config: LitLLMConfig, width: int, *, rms: bool) -> None:
        super().__init__()
        self.eps, self.rms, self.offset = config.norm_eps, rms, float(config.norm_unit_offset)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm_bias and not rms else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight + self.offset if self.offset else self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Convolution(nn.Module):
    """Causal convolution by channel: y_t = x_t + Σ_i w_i x_(t - i), i = 0 … n - 1. In the sum, masked positions count as 0."""

    def __init__(self, positions: int, channels: int, slot: int) -> None:
        super().__init__()
        self.positions, self.slot = positions, slot
        self.weight = nn.Parameter(torch.zeros(channels * positions))

    def forward(self, x: Tensor, seen: Tensor, cache: DynamicCache | None) -> Tensor:
        """Convolve x, (B, T, c) → (B, T, c). seen: (B, S) bool, False if masked. cache: has earlier inputs; x is appended."""
        length = x.size(1)
        past = x * seen[:, -length:, None].to(x.dtype)
        if cache is not None:
            past = cache.update(past[:, None], past[:, None, :, :0], self.slot)[0][:, 0]
        past = F.pad(past, (0, 0, self.positions - 1, 0))[:, -(length + self.positions - 1) :].transpose(1, 2)
        kernel = self.weight.view(-1, 1, self.positions).flip(2)  # (c, 1, n), stored with the newest position first
        return x + F.conv1d(past, kernel, groups=x.size(2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: LitLLMConfig, block: int) -> None:
        super().__init__()
        self.config, self.slot, self.window = config, block * SLOTS, config.blocks[block]["window"]
        heads, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.query = nn.Linear(config.n_embd, heads, bias=config.qkv_bias)
        self.key = nn.Linear(config.n_embd, kv, bias=config.qkv_bias)
        self.value = nn.Linear(config.n_embd, kv, bias=config.qkv_bias)
        self.project = nn.Linear(heads, config.n_embd, bias=config.attention_output_bias)
        if config.qkv_convolution:
            self.query_convolution = Convolution(config.qkv_convolution, heads, self.slot + 3)
            self.key_convolution = Convolution(config.qkv_convolution, kv, self.slot + 4)
            self.value_convolution = Convolution(config.qkv_convolution, kv, self.slot + 5)
        if config.qk_norm:
            of_head = config.qk_norm_width == "head"
            self.query_norm = Norm(config, config.head_dim if of_head else heads, rms=True)
            self.key_norm = Norm(config, config.head_dim if of_head else kv, rms=True)
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.attention_sinks else None

    def heads(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Split x, (B, T, heads · h) → (B, heads, T, h). A `norm` of width heads · h normalises all heads as one."""
        if norm is not None and norm.weight.numel() == x.size(-1):
            x, norm = norm(x), None
        x = x.unflatten(-1, (-1, self.config.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, seen: Tensor, cache: DynamicCache | None) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.config.qkv_convolution:
            q, k = self.query_convolution(q, seen, cache), self.key_convolution(k, seen, cache)
            v = self.value_convolution(v, seen, cache)
        q, k = self.heads(q, getattr(self, "query_norm", None)), self.heads(k, getattr(self, "key_norm", None))
        v = self.heads(v, None)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        own = v
        if cache is not None:
            k, v = cache.update(k, v, self.slot)
        scale = self.config.attention_scale or self.config.head_dim**-0.5
        grouped = q.unflatten(1, (k.size(1), -1))  # (B, K, H / K, T, h)
        scores = scale * (grouped @ k[:, :, None].mT).float()  # (B, K, H / K, T, S)
        if (cap := self.config.attention_softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        length, positions = x.size(1), torch.arange(k.size(2), device=x.device)
        distance = positions[-length:, None] - positions  # (T, S)
        sees = (distance >= 0) & (distance < (self.window or k.size(2)))
        sees = sees & seen[:, None, None, None, -k.size(2) :]  # (B, 1, 1, T, S)
        scores = scores.masked_fill(~sees, torch.finfo(torch.float32).min)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, k.size(1), -1, 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : k.size(2)].to(v.dtype)
        y = weights @ v[:, :, None]  # (B, K, H / K, T, h)
        if self.config.exclusive_attention:  # remove y's component along the position's own value vector
            mine = own[:, :, None].float()
            square = mine.square().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            y = y - ((y.float() * mine).sum(-1, keepdim=True) / square * mine).to(y.dtype)
        return self.project(y.flatten(1, 2).transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + r/2) of x, (B, heads, T, h). cos and sin of the angles: (B, 1, T, r/2)."""
    half = cos.size(-1)
    first, second, kept = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: LitLLMConfig) -> None:
        super().__init__()
        self.kind, self.approximate = config.mlp, config.gelu_approximate
        self.up = nn.Linear(config.n_embd, config.mlp_width, bias=config.mlp_bias)
        self.gate = nn.Linear(config.n_embd, config.mlp_width, bias=config.mlp_bias) if "glu" in config.mlp else None
        self.project = nn.Linear(config.mlp_width, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = up if self.gate is None else self.gate(x)
        if self.kind == "relu2":
            inner = F.relu(inner).square()
        else:
            inner = F.silu(inner) if self.kind == "swiglu" else F.gelu(inner, approximate=self.approximate)
        return self.project(inner if self.gate is None else inner * up)


class Block(nn.Module):
    def __init__(self, config: LitLLMConfig, block: int) -> None:
        super().__init__()
        self.config, rms = config, config.norm == "rmsnorm"
        for name, number in (("attention", 1), ("mlp", 2)):
            if config.norm_position != "post":
                setattr(self, f"{name}_norm", Norm(config, config.n_embd, rms=rms))
            if config.norm_position != "pre":
                setattr(self, f"{name}_output_norm", Norm(config, config.n_embd, rms=rms))
            if config.input_convolution:
                setattr(
                    self, f"{name}_convolution", Convolution(config.input_convolution, config.n_embd, block * SLOTS + number)
                )
        self.attention, self.mlp = Attention(config, block), MLP(config)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, seen: Tensor, cache: DynamicCache | None) -> Tensor:
        after = x + self.branch("attention", x, seen, cache, turn, seen, cache)
        return after + self.branch("mlp", x if self.config.parallel_residual else after, seen, cache)

    def branch(self, name: str, x: Tensor, seen: Tensor, cache: DynamicCache | None, *more: Any) -> Tensor:
        x = getattr(self, f"{name}_norm", nn.Identity())(x)
        if self.config.input_convolution:
            x = getattr(self, f"{name}_convolution")(x, seen, cache)
        y = getattr(self, name)(x, *more)
        return getattr(self, f"{name}_output_norm", nn.Identity())(y) * self.config.residual_scale


class LitLLMForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LitLLMConfig
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: LitLLMConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = Norm(config, config.n_embd, rms=config.norm == "rmsnorm")
        self.head = None if config.tie_word_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, V) in fp32 and, with labels (B, T), the next-token loss in nats. Labels of -100 are ignored.

        Args:
            attention_mask: (B, S), 0 for positions to which no position attends, such as padding.
            logits_to_keep: for how many last positions to return logits (0: all), or the indices of these positions.
            num_items_in_batch: the divisor of the summed loss; None: the number of labels other than -100.

        Raises:
            ValueError: an argument is not supported, or there are too many positions.
        """
        config = self.config
        for name, value in others.items():
            if value is not None and value is not (name == "return_dict"):
                raise ValueError(f"this model has no {name}: leave it out")
        if not isinstance(past_key_values, DynamicCache | None):
            raise ValueError(f"past_key_values must be a DynamicCache, not {type(past_key_values).__name__}")
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        if layers := getattr(cache, "layers", None):  # a cache made for n_layer entries adds others on use
            cache.layer_class_to_replicate = type(layers[0])  # type: ignore[union-attr]
        start, length = 0 if cache is None else cache.get_seq_length(), input_ids.size(1)
        if start + length > config.block_size:
            raise ValueError(f"the model has {config.block_size} positions (block_size), not {start + length}")
        seen = torch.ones_like(input_ids[:, :1], dtype=torch.bool).expand(-1, start + length)
        if attention_mask is not None:
            if attention_mask.shape != seen.shape:
                raise ValueError(f"attention_mask must be {tuple(seen.shape)}, not {tuple(attention_mask.shape)}")
            seen = attention_mask.bool()
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, start:]  # (B, T)
        x = self.embedding(input_ids) * (config.embedding_scale or 1.0)
        x = x if self.positions is None else x + self.positions(places)
        for block, settings in zip(self.blocks, config.blocks, strict=True):
            half = config.rotated_dims // 2
            turn = None
            if settings["rope"]:
                frequency = settings["rope_theta"] ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
                angle = places[:, None, :, None] * frequency  # (B, 1, T, r/2)
                turn = angle.cos(), angle.sin()
            x = block(x, turn, seen, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        x = self.norm(x)[:, kept] * config.logit_scale
        logits = F.linear(x, self.embedding.weight if self.head is None else self.head.weight).float()
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
