"""Techniques of the ladder that change the model or the loss."""

from __future__ import annotations

from functools import partial

from ladder_techniques import Technique

from lit_llm.models.loss import cross_entropy

TECHNIQUES = [
    Technique("half-rope", "half-truncated rotary embedding: modded-nanogpt; GPT-NeoX", config={"partial_rotary_factor": 0.5}),
    Technique("z-loss", "PaLM, arXiv 2204.02311, section 5", loss=partial(cross_entropy, z_loss=1e-4)),
]
