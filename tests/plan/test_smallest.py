"""The smallest hardware for a run, against 16 bytes per parameter and the table of capacities, by hand."""

from dataclasses import replace

import pytest

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallel_layout import layout_of_name
from lit_llm.models.config import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.plan import Optimizer, PlannedRun, make_plan, table, total_parameters
from lit_llm.reporting.recipe_header import smallest

GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False}
XL = GPTConfig(n_layer=48, n_head=25, n_embd=1600, block_size=1024, vocab_size=50257, **GPT2)
LARGE = GPTConfig(n_layer=54, n_head=48, n_embd=6144, block_size=2048, vocab_size=50257, **GPT2)


def run(model: GPTConfig, **changes) -> PlannedRun:
    values = {"max_steps": 10, "global_batch_size": 512, "micro_batch_size": 1, "precision": "bf16-mixed", **changes}
    return PlannedRun(model, Optimizer("AdamW", fused=True), **{"loss": LossConfig(chunk_size=1024), **values})


def test_a_run_of_two_gigabytes_needs_no_accelerator():
    small = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=2048)
    found = smallest(run(small, global_batch_size=8, micro_batch_size=8, precision="32-true"))
    assert (found.hardware.name, found.devices, found.flags) == ("cpu", 1, ())
    states = 16 * total_parameters(small)
    assert states < found.bytes_per_device < 2e9 and str(found) == f"a CPU: {found.bytes_per_device / 1e9 + 0.72:.1f} GB"
    # 124M parameters with AdamW in fp32 are 16 bytes each = 1.99 GB, so with activations more than two.
    assert smallest(
        run(GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, **GPT2))
    ).hardware.is_gpu


def test_among_equal_memory_the_cheapest_is_taken():
    # 774M x 16 bytes = 12.4 GB: a card of 24, of which an RTX 4090 is rented for less than an L4.
    found = smallest(run(GPTConfig(n_layer=36, n_head=20, n_embd=1280, block_size=1024, vocab_size=50257, **GPT2)))
    assert str(found) == "1 x rtx-4090" and found.flags == ()


def test_several_devices_share_everything():
    # 24.8B x 16 bytes = 397 GB: of 2 x 256, 16 x 32, 4 x 141, 2 x 288, 16 x 40, 8 x 80 the first two are least. The first is
    # rented for less.
    assert 396e9 < 16 * total_parameters(LARGE) < 398e9
    found = smallest(run(LARGE))
    assert str(found) == "2 x mi325x"
    assert found.flags == ("--config strategy/fsdp2",)  # gathered in bf16, weights leave autocast no copies to keep
    plan = make_plan(run(LARGE, layout=layout_of_name("fsdp2", 2, 8)), found.hardware)
    assert plan.fits and plan.memory.needed == found.bytes_per_device


def test_a_flag_is_named_only_if_needed():
    card = table()["rtx-4090"]
    settings = run(
        GPTConfig(n_layer=24, n_head=16, n_embd=1024, block_size=1024, vocab_size=50257, **GPT2), micro_batch_size=64
    )
    assert make_plan(settings, card).fits is False and make_plan(replace(settings, micro_batch_size=1), card).fits is True
    found = smallest(settings)
    assert (str(found), found.flags) == ("1 x rtx-4090", ("--data.micro_batch_size 1",))
    fits = next(micro for micro in (32, 16, 8, 4, 2, 1) if make_plan(replace(settings, micro_batch_size=micro), card).fits)
    assert smallest(replace(settings, micro_batch_size=fits)).flags == ()


@pytest.mark.parametrize("model", [XL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["1.5b", "13b"])
def test_nothing_that_fits_has_less_memory(model):
    found = smallest(run(model))
    least = found.devices * found.hardware.memory_gb
    for hardware in (each for each in table().values() if each.is_gpu):
        for n in (1, 2, 4, 8, 16):
            if n * hardware.memory_gb < least:
                for mode in ("none", "full"):
                    tried = run(
                        model, compute=ComputeConfig(mode), layout=layout_of_name("fsdp2", n, hardware.devices_per_node)
                    )
                    assert make_plan(tried, hardware).fits is False, (hardware.name, n, mode)
