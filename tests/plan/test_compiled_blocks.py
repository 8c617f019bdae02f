"""What compiled blocks keep, against a formula and against torch's own partitioner."""

import contextlib

import pytest
import torch
from planned_steps import step_of

from lit_llm.distributed.activation_checkpointing import recompute_block
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.plan.micro_batch import micro_batch

SIZES = {"n_embd": 64, "n_head": 4, "n_kv_head": 2, "mlp_width": 160, "vocab_size": 256, "block_size": 128}
LLAMA = {**SIZES, "mlp": "swiglu", "qk_norm": False}
GPT2 = {**SIZES, "mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "qk_norm": False}


def kept_by_a_block(model: dict, mode: str, precision: str = "bf16-true", *, cuda: bool = False) -> int:
    """Planned: what one layer more keeps until the loss."""

    def until_the_loss(n_layer: int) -> int:
        step = step_of(
            GPTConfig(n_layer=n_layer, **model), 2, precision=precision, cuda=cuda, compute=ComputeConfig(mode, compile=True)
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("model", "mode"), [(LLAMA, "none"), (LLAMA, "cheap"), (GPT2, "none")], ids=["LLaMA", "cheap", "GPT-2"]
)
def test_the_partitioner_keeps_as_much(model, mode, precision):
    measured = partitioned(model, mode, precision, 4) - partitioned(model, mode, precision, 3)
    assert kept_by_a_block(model, mode, precision) == pytest.approx(measured, rel=0.01)


def partitioned(model: dict, mode: str, precision: str, n_layer: int) -> int:
    """Bytes that autograd saves of a compiled model, without weights."""
    torch._dynamo.reset()
    gpt = GPT(GPTConfig(n_layer=n_layer, **model)).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    for block in gpt.blocks:
        if mode != "none":
            recompute_block(block, mode, preserve_rng_state=False)
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    own = {x.untyped_storage().data_ptr() for x in (*gpt.parameters(), *gpt.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    ids = torch.zeros(2, 128, dtype=torch.int64)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        loss = gpt(ids, ids).loss
        size = sum(storage.nbytes() for at, storage in saved.items() if at not in own)
    del loss
    return size
