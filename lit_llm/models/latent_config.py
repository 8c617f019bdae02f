"""The settings of latent attention (`model.latent`), and which other settings can be combined with it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from lit_llm.core.number_domain import above, whole


@dataclass
class LatentConfig:
    """Multi-head latent attention: all heads' keys and values are computed from one narrow vector per position, the latent.

    Generation caches the latents instead of keys and values. The defaults are DeepSeek-V3's widths. Source: DeepSeek-V2,
    arXiv 2405.04434, section 2.1.
    """

    kv_rank: Annotated[int, whole(1, 1_000_000)] = 512
    """Width of the latent vector from which keys and values are computed."""
    query_rank: Annotated[int | None, whole(1, 1_000_000)] = None
    """Width of the latent from which queries are computed (DeepSeek-V3: 1536). None: queries are projected from the input."""
    nope_head_dim: Annotated[int, whole(1, 65_536)] = 128
    """Number of dimensions of a head's queries and keys without rotary embedding."""
    rope_head_dim: Annotated[int, whole(2, 65_536)] = 64
    """Number of dimensions, even, of a head's queries and keys with rotary embedding. All heads share these key dimensions."""
    value_head_dim: Annotated[int, whole(1, 65_536)] = 128
    """Width of a head's values."""
    norm_eps: Annotated[float, above(0, 1)] = 1e-6
    """Epsilon of the RMSNorms of the latents. DeepSeek's models use 1e-6 for these norms."""

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys: nope_head_dim + rope_head_dim."""
        return self.nope_head_dim + self.rope_head_dim

    def widths(self, n_head: int) -> tuple[int, ...]:
        """Return the widths of three vectors that projections read (other projections read the residual stream): the latent of
        queries (1 if there is none), the latent of keys and values, and the outputs of all `n_head` heads."""
        return self.query_rank or 1, self.kv_rank, n_head * self.value_head_dim

    def matrices(self, n_embd: int, n_head: int) -> int:
        """Number of parameters of the projections of a block's latent attention, without biases."""
        queries, shared = n_head * self.head_dim, n_embd * (self.kv_rank + self.rope_head_dim)
        of_queries = n_embd * queries if self.query_rank is None else self.query_rank * (n_embd + queries)
        of_keys_and_values = self.kv_rank * n_head * (self.nope_head_dim + self.value_head_dim)
        return of_queries + shared + of_keys_and_values + n_head * self.value_head_dim * n_embd

    def problems(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yield (sentence, flags that mend the mistake) for each setting of `model`, a `GPTConfig`, that cannot be combined
        with latent attention. All numbers must be within their ranges."""
        if self.rope_head_dim % 2:
            yield (
                f"model.latent.rope_head_dim is {self.rope_head_dim}, but rotary positions need an even number",
                "--model.latent.rope_head_dim",
            )
        if model.n_kv_head not in (None, model.n_head):
            yield (
                f"model.n_kv_head is {model.n_kv_head}, but with model.latent all {model.n_head} heads have keys of their own",
                "--model.n_kv_head null",
            )
        if model.qk_norm:
            yield "model.qk_norm does not go with model.latent, which normalises the latents", "--model.qk_norm false"
        others: dict[str, tuple[bool | float | None, str]] = {
            "head_dim": (None, "the widths of heads are model.latent's"),
            "partial_rotary_factor": (1.0, "what is rotated is model.latent.rope_head_dim"),
            "qkv_convolution": (None, "keys and values exist for single positions only"),
            "exclusive_attention": (False, "outputs and values of a head differ in width from its keys"),
            "attention_sinks": (False, "no model has both"),
            "base_width": (None, "no rule says how ranks grow with the width"),
        }
        for name, (off, why) in others.items():
            value = getattr(model, name)
            if value != off:
                plain = "null" if off is None else str(off).lower()
                yield (f"model.{name} is {value}, but with model.latent it must be {plain}: {why}", f"--model.{name} {plain}")
