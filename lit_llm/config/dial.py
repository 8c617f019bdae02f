"""`depth: N` in a recipe, or `--depth N`: compute a run's model size, batch size, number of steps and learning rates from N."""

from __future__ import annotations

import math
from typing import Any

from lit_llm.core.errors import UserError

DEPTH = "depth"
DEPTHS = range(2, 65)
WIDTH_PER_LAYER = 64
HEAD_DIM = 64
BLOCK_SIZE = 1024
TOKENS_PER_PARAMETER = 20
REFERENCE_DEPTH, REFERENCE_TOKENS, REFERENCE_RATE, REFERENCE_DECAY = 12, 2**19, 0.02, 0.1
BASE_DEPTH = 4


def tokens_of(depth: int) -> int:
    """Return the training tokens of a model of `depth` blocks: 20 for each of 12 · depth · width² hidden matrix elements."""
    return TOKENS_PER_PARAMETER * 12 * depth * (WIDTH_PER_LAYER * depth) ** 2


def depth_of(value: Any, where: str) -> int:
    """Return `value`, a given depth, as an integer. `where`: end of the error's sentence, which names the recipe or the flag.

    Raises:
        UserError: `value` is not a whole number in DEPTHS.
    """
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) not in DEPTHS:
        raise UserError(f"depth is {text[:20]}, but must be a whole number from {DEPTHS[0]} to {DEPTHS[-1]} {where}")
    return int(text)


def settings_of(depth: int) -> dict[str, Any]:
    """Return the recipe settings that follow from the depth. The header of recipes/dial.yaml has the formulas' sources."""
    tokens = tokens_of(depth)
    longer = tokens / tokens_of(REFERENCE_DEPTH)
    batch = 2 ** round(math.log2(REFERENCE_TOKENS * longer**0.383))  # tokens a step
    noise = math.sqrt(batch / REFERENCE_TOKENS)
    rate = _rounded(REFERENCE_RATE * noise)
    return {
        "model": {
            "n_layer": depth,
            "n_embd": WIDTH_PER_LAYER * depth,
            "n_head": WIDTH_PER_LAYER * depth // HEAD_DIM,
            "block_size": BLOCK_SIZE,
            "base_width": WIDTH_PER_LAYER * BASE_DEPTH,
            "base_depth": BASE_DEPTH,
        },
        "data": {"init_args": {"global_batch_size": batch // BLOCK_SIZE}},
        "optimizer": {
            "init_args": {"lr": rate, "adamw_lr": rate, "weight_decay": _rounded(REFERENCE_DECAY * noise / longer)},
        },
        "trainer": {"max_steps": round(tokens / batch)},
    }


def _rounded(number: float) -> float:
    """Return `number` rounded to three significant digits."""
    return float(f"{number:.3g}")
