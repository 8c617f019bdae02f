"""Rotary position embeddings (RoPE, Su et al. 2021), the ways to scale their frequencies, and positions within documents.

Shape letters: B sequences, T and S positions, h ``head_dim``, r rotated dimensions of a head (``partial_rotary_factor`` * h).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_llm.models.small_layers import KeepsPrecision


class PositionsInDocuments(NamedTuple):
    """Record: for each position of a sequence, its number in its document, and the document's length."""

    positions: Tensor
    """(B, S) int64: number of the position in its document, from 0."""
    lengths: Tensor
    """(B, S) int64: number of positions that the position's document has in the sequence."""


def document_numbers(ids: Tensor, eos_id: int) -> Tensor:
    """Number the documents of each sequence: (B, S) ids → (B, S) document numbers.

    An end-of-document id counts as the first position of the next document, whose first token is predicted from this id.
    The data module numbers documents in the same way if documents do not start with an id such as BOS.
    """
    return ids.eq(eos_id).cumsum(dim=1)


def places_in(documents: Tensor) -> PositionsInDocuments:
    """Return the `PositionsInDocuments` for (B, S) document numbers, which never decrease along a sequence. No host
    synchronisation."""
    batch, size = documents.shape
    place = torch.arange(size, device=documents.device).expand(batch, size)  # (B, S)
    changes = documents[:, 1:] != documents[:, :-1]  # (B, S - 1)
    edge = changes.new_ones(batch, 1)
    first = torch.where(torch.cat((edge, changes), dim=1), place, 0).cummax(dim=1).values
    last = torch.where(torch.cat((changes, edge), dim=1), place, size).flip(1).cummin(dim=1).values.flip(1)
    return PositionsInDocuments(place - first, last - first + 1)


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, (T, r/2) fp32 each, or (B, 1, T, r/2) if sequences have documents."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys, half-split: dimensions i and i + r/2 are rotated as a pair.

    Args:
        x: (B, heads, T, h). Dimensions from r on are not changed.
        cos, sin: cosine and sine of the angles, (T, r/2) or (B, 1, T, r/2).

    Returns:
        (B, heads, T, h) in the dtype of x.
    """
    half = cos.size(-1)
    first, second, kept = x.split((half, half, x.size(-1) - 2 * half), dim=-1)  # (B, heads, T, r/2) twice, (…, h - r)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*parts, kept) if kept.size(-1) else parts, dim=-1).to(x.dtype)


class RotaryTable(KeepsPrecision):
    """fp32 cosines and sines of the angles of all positions, shared by layers with the same rope_theta and rope_scaling.

    In bf16, position 4,001 would get the angle of position 4,000.

    Args:
        positions: number of positions, T.
        rotated: number of rotated dimensions r of a head, even.
        theta: base of the frequencies.
        scaling: `GPTConfig.rope_scaling`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, positions: int, rotated: int, theta: float, scaling: dict[str, Any] | None) -> None:
        super().__init__()
        self.theta, self.scaling = theta, scaling
        # LongRoPE has one table for short sequences and one for long ones.
        self.short_context = None
        if scaling is not None and scaling.get("rope_type") == "longrope":
            self.short_context = scaling["original_max_position_embeddings"]
        tables = 1 if self.short_context is None else 2
        self.register_buffer("cos", torch.empty(tables, positions, rotated // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)

    def forward(self, start: int, end: int, places: PositionsInDocuments | None = None) -> Rotation:
        """Return cosines and sines of the positions from `start` to `end`, (end - start, r/2) each.

        Args:
            places: positions in documents, (B, T), used instead of `start` and `end`: each document is rotated as if it were
                alone, and the results are (B, 1, T, r/2). None: sequences are not divided into documents.
        """
        if places is not None:
            long = 0 if self.short_context is None else (places.lengths > self.short_context).long()  # (B, T)
            return self.cos[long, places.positions][:, None], self.sin[long, places.positions][:, None]
        table = 1 if self.short_context is not None and end > self.short_context else 0
        return self.cos[table, start:end], self.sin[table, start:end]

    @torch.no_grad()
    def fill(self) -> None:
        """Compute the cosines and sines of the table. Required after `to_empty`."""
        tables, positions, half = self.cos.shape
        device = self.cos.device
        unscaled = self.theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)  # (r/2,)
        position = torch.arange(positions, device=device, dtype=torch.float32)  # (T,)
        for table in range(tables):
            frequency, amplitude = scale_frequencies(unscaled, self.theta, self.scaling, positions=positions, long=table == 1)
            angle = torch.outer(position, frequency)  # (T, r/2)
            self.cos[table] = angle.cos().mul_(amplitude)
            self.sin[table] = angle.sin().mul_(amplitude)


def scale_frequencies(
    frequency: Tensor, theta: float, scaling: dict[str, Any] | None, *, positions: int, long: bool
) -> tuple[Tensor, float]:
    """Return scaled rotary frequencies (r/2,), and a factor for cosines and sines, whose square scales attention scores.

    Args:
        frequency: (r/2,) radians per position.
        theta: base of the frequencies.
        scaling: `GPTConfig.rope_scaling`.
        positions: longest context of the model.
        long: use LongRoPE's long_factor, for sequences longer than the original context, instead of short_factor.
    """
    if scaling is None:
        return frequency, 1.0
    values = {key: value for key, value in scaling.items() if key != "rope_type"}
    kind = scaling.get("rope_type", "llama3")
    if kind == "linear":  # position interpolation (Chen et al. 2023)
        return frequency / values["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequency, **values), 1.0
    if kind == "yarn":
        return _yarn(frequency, theta, **values)
    return _longrope(frequency, positions, long, **values)


def _llama3(
    frequency: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's frequencies for a context `factor` times as long as the original context (Grattafiori et al. 2024, code).

    A frequency with more than `high_freq_factor` turns in the original context is kept. A frequency with fewer than
    `low_freq_factor` turns is divided by `factor`. In between, both are interpolated linearly in the number of turns.
    """
    turns = frequency * original_max_position_embeddings / (2 * math.pi)  # (r/2,)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def _yarn(
    frequency: Tensor,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """YaRN's frequencies (r/2,) and factor of cosines and sines (Peng et al. 2023, arXiv 2309.00071).

    Frequencies with more than `beta_fast` turns in the original context are kept, and frequencies with fewer than `beta_slow`
    turns are divided by `factor`. In between, both are interpolated linearly in the index of the frequency.

    Args:
        attention_factor: factor of cosines and sines. None: 0.1 ln(factor) + 1.
        truncate: round the first and last interpolated index outwards, as the released code does.
    """
    half = frequency.numel()

    def index(turns: float) -> float:
        """Return the index, a fraction, at which the frequency would make `turns` turns in the original context."""
        return half * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index(beta_fast), index(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    last = last if last > first else first + 0.001  # a step instead of a ramp
    divided = ((torch.arange(half, device=frequency.device) - first) / (last - first)).clamp(0, 1)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return frequency * (1 - divided) + frequency / factor * divided, attention_factor


def _longrope(
    frequency: Tensor,
    positions: int,
    long: bool,
    *,
    original_max_position_embeddings: float,
    short_factor: list[float],
    long_factor: list[float],
    factor: float | None = None,
    attention_factor: float | None = None,
) -> tuple[Tensor, float]:
    """LongRoPE's frequencies (r/2,), each with its own divisor, and factor of cosines and sines (Ding et al. 2024, 2402.13753).

    Args:
        factor: length of the context / length of the original context. None: `positions` / length of the original context.
        attention_factor: factor of cosines and sines. None: sqrt(1 + ln(factor) / ln(original context)).
    """
    divisors = torch.tensor(long_factor if long else short_factor, device=frequency.device, dtype=torch.float32)  # (r/2,)
    if attention_factor is None:
        factor = positions / original_max_position_embeddings if factor is None else factor
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original_max_position_embeddings))
    return frequency / divisors, attention_factor
