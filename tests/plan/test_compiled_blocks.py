"""What compiled blocks keep, against formulas."""

import pytest

from lit_llm.models.gpt import GPTConfig
from lit_llm.plan.micro_batch import Step, micro_batch

SIZES = {"n_embd": 64, "n_head": 4, "n_kv_head": 2, "mlp_width": 160, "vocab_size": 256, "block_size": 128}
LLAMA = {**SIZES, "mlp": "swiglu", "qk_norm": False}
BYTES = {"32-true": (4, 4), "bf16-true": (2, 2)}


def kept_by_a_block(model: dict, mode: str, precision: str = "bf16-true", *, cuda: bool = False) -> int:
    """Planned: what one layer more keeps until the loss."""

    def until_the_loss(n_layer: int) -> int:
        step = Step(GPTConfig(n_layer=n_layer, **model), 2, *BYTES[precision], checkpointing=mode, cuda=cuda, compiled=True)
        return micro_batch(step).peaks["loss head"]["activations"]

    return until_the_loss(4) - until_the_loss(3)


def test_products_attention_and_their_inputs_are_kept():
    # x, two norms' results, queries, keys, values, attention's result and its copy by positions, the projection's result;
    # gate, up and their product. In bf16, with a number in fp32 per head.
    d, kv, hidden, heads = 64, 32, 160, 4
    tokens = 2 * 128
    assert kept_by_a_block(LLAMA, "none", cuda=True) == pytest.approx(
        tokens * (2 * (7 * d + 2 * kv + 3 * hidden) + 4 * heads), abs=24
    )  # besides the kernel's seed


def test_with_cheap_recomputation_only_results_are_kept():
    # x, queries, keys, values, attention's result, the projection's result; gate and up.
    d, kv, hidden, heads = 64, 32, 160, 4
    tokens = 2 * 128
    assert kept_by_a_block(LLAMA, "cheap", cuda=True) == pytest.approx(
        tokens * (2 * (4 * d + 2 * kv + 2 * hidden) + 4 * heads), abs=24
    )


def test_recomputed_blocks_keep_their_input():
    assert kept_by_a_block(LLAMA, "full", cuda=True) == 2 * 128 * 64 * 2
