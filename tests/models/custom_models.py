"""Models as a user might bring them: torch only, each kept to the contract or breaking one line of it."""

import torch
from torch import nn


class LSTMModel(nn.Module):
    """Recurrent, residual; its first weights do not depend on what was drawn before."""

    def __init__(self, vocab_size: int, width: int = 16, n_layer: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embedding = nn.Embedding(vocab_size, width)
            self.blocks = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(n_layer))
            self.dropout = nn.Dropout(dropout)
            self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)  # (B, T, d)
        for block in self.blocks:
            x = x + self.dropout(block(x)[0])
        return self.head(x)


class ConvModel(nn.Module):
    """Without blocks: causal convolution, a buffer that its initialisation computes, and a tied matrix."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.convolution = nn.Conv1d(width, width, kernel_size=3)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), width**-0.5), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).transpose(1, 2)  # (B, d, T)
        x = self.convolution(nn.functional.pad(x, (2, 0))).transpose(1, 2)  # (B, T, d)
        return (self.norm(x) * self.scale) @ self.embedding.weight.T


class WithoutVocabulary(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


class NoModule:
    def __init__(self, vocab_size: int) -> None: ...


class LastLogitsOnly(LSTMModel):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)[:, -1]


class ListOfBlocks(LSTMModel):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        blocks = list(self.blocks)
        del self.blocks
        self.blocks = blocks


class SeesAhead(LSTMModel):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.flip(1)).flip(1)


class OtherActivation(LSTMModel):
    def __init__(self, vocab_size: int, activation: nn.Module) -> None:
        super().__init__(vocab_size)
