"""Models as users might bring them, of many kinds, for tests of the plan and for benchmarks/plan_accuracy_own.py."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTM(nn.Module):
    """torch's recurrent layers."""

    def __init__(self, vocab_size: int, width: int = 256, n_layer: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, n_layer, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0])


class LoopGRU(nn.Module):
    """A recurrence written as a loop over time."""

    def __init__(self, vocab_size: int, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        h = x.new_zeros(x.size(0), x.size(2))
        states = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            states.append(h)
        return self.head(torch.stack(states, dim=1))


class GatedConvolution(nn.Module):
    """A short depthwise convolution with a gate."""

    def __init__(self, width: int, kernel: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.project = nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.project(self.norm(x)).chunk(2, dim=-1)
        u = self.convolution(u.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
        return x + self.out(F.silu(gate) * u)


class Hyena(nn.Module):
    """A convolution as long as the sequence, by FFT, with a gate."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.filter = nn.Parameter(torch.randn(width, length) * 0.02)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        q, k, v = self.project(self.norm(x)).transpose(1, 2).chunk(3, dim=1)
        spectrum = torch.fft.rfft(self.filter[:, :n].float(), n=2 * n)
        y = torch.fft.irfft(torch.fft.rfft((k * v).float(), n=2 * n) * spectrum, n=2 * n)[..., :n]
        return x + self.out((q * y.to(q.dtype)).transpose(1, 2))


class Convolutional(nn.Module):
    """Short and long convolutions in turn."""

    def __init__(self, vocab_size: int, width: int = 192, n_layer: int = 4, length: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Hyena(width, length) if i % 2 else GatedConvolution(width) for i in range(n_layer))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal attention by torch's kernel."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Hybrid(nn.Module):
    """Attention after every three convolutions; the head is tied."""

    def __init__(self, vocab_size: int, width: int = 256, n_layer: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Attention(width) if i % 4 == 3 else GatedConvolution(width) for i in range(n_layer))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(nn.Module):
    """One block, used several times (ALBERT), and an embedding in two factors, of which one is frozen."""

    def __init__(self, vocab_size: int, width: int = 256, repeats: int = 6, rank: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, rank)
        self.wider = nn.Linear(rank, width, bias=False).requires_grad_(False)
        self.block = nn.Sequential(
            Attention(width), nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.repeats = repeats
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wider(self.embedding(input_ids))
        for _ in range(self.repeats):
            x = x + self.block(x)
        return self.head(x)


class EncoderDecoder(nn.Module):
    """torch's Transformer layers: a causal encoder, and a decoder that attends to it one position later."""

    def __init__(self, vocab_size: int, width: int = 128, n_layer: int = 2, length: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        options = {"dim_feedforward": 4 * width, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **options) for _ in range(n_layer))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 4, **options) for _ in range(n_layer))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        t = input_ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=input_ids.device)
        x = self.embedding(input_ids) + self.positions(torch.arange(t, device=input_ids.device))
        memory = x
        for layer in self.encoder:
            memory = layer(memory, src_mask=mask)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, memory_mask=mask)
        return self.head(x)


class GPT2(nn.Module):
    """transformers' GPT-2."""

    def __init__(self, vocab_size: int, **settings: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"n_layer": 3, "n_embd": 192, "n_head": 4, "n_positions": 256} | settings
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **sizes))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Llama(nn.Module):
    """transformers' LLaMA."""

    def __init__(self, vocab_size: int, **settings: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **(sizes | settings)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class ReadsValues(LSTM):
    """Control flow that depends on the data."""

    def forward(self, input_ids: Tensor) -> Tensor:
        z = super().forward(input_ids)
        return z * 2 if z.abs().max() > 10 else z


class NeedsData(LSTM):
    """A constructor that reads values, and a buffer from them."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__(vocab_size, width)
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.register_buffer("rates", torch.tensor(rates))


class SelectsByValue(LSTM):
    """A number of rows that depends on the data."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x[input_ids > 9] = x[input_ids > 9].relu()
        return self.head(x)
