"""What FSDP2 keeps whole by `auto`, on the planned hardware."""

from dataclasses import replace

import pytest

from lit_llm.distributed.keep_rule import KEPT_WHOLE_SHARE
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.config import GPTConfig
from lit_llm.plan import Optimizer, PlannedRun, find, make_plan
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.memory import peak_memory, resolved
from lit_llm.plan.weights import weights_of
from lit_llm.reporting.plan_text import markdown

D, LAYERS, ROWS = 64, 2, 512
MODEL = GPTConfig(
    n_layer=LAYERS, n_head=4, n_embd=D, block_size=64, vocab_size=ROWS, mlp_width=256, qk_norm=False, tie_embeddings=False
)
VECTORS = (2 * LAYERS + 1) * D
LINEAR = LAYERS * (4 * D * D + (3 if "glu" in MODEL.mlp else 2) * D * 256) + ROWS * D
WEIGHTS = LINEAR + ROWS * D + VECTORS


def run(devices=4, precision="bf16-mixed", **strategy):
    layout = layout_of(MeshStrategy(**strategy), devices, 8)
    return PlannedRun(MODEL, Optimizer("AdamW", fused=True), 1, 32, 2, precision, layout=layout)


def hardware(device_bytes):
    return replace(find("h100-sxm"), memory_gb=device_bytes / 1e9)


def kept(settings, device_bytes):
    """On a processor, whose memory the ranks share."""
    layout = resolved(settings, replace(find("cpu"), memory_gb=device_bytes / 1e9 * settings.layout.devices)).layout
    return tuple(layout.kept)


def test_auto_keeps_what_takes_at_most_an_eighth_of_the_memory():
    gathered, gradients = 2 * LINEAR + 4 * (ROWS * D + VECTORS), 4 * WEIGHTS  # linear layers in bf16, the rest in fp32
    assert kept(run(), 8 * gradients + 8) == (True, True)
    assert kept(run(), 8 * gradients - 8) == kept(run(), 8 * gathered + 8) == (True, False)
    assert kept(run(), 8 * gathered - 8) == (False, False)
    assert kept(run(precision="32-true"), 8 * gradients - 8) == (False, False)  # whole weights are fp32, too
    assert kept(run(reshard_after_forward=True, reduce_each_micro_batch=False), 1e12) == (False, True)
    assert kept(run(pipeline=2), 1) == (True, True)
    unknown = resolved(run(), find("cpu")).layout
    assert unknown.kept == (False, False)


@pytest.mark.parametrize(
    "strategy", [{"pipeline": 2}, {}, {"reduce_each_micro_batch": False}, {"pipeline": 2, "schedule": "zbv"}], ids=str
)
def test_on_a_gpu_auto_keeps_what_fits(strategy):
    """Of each memory of the device, the choice is the first that fits of those that a user could ask for by name."""
    model = replace(MODEL, n_layer=8, n_embd=1024, n_head=8, block_size=1024, mlp_width=4096)
    settings = replace(run(8, **strategy), model=model, global_batch_size=128, micro_batch_size=4)
    asked = {"reshard_after_forward": "auto", "reduce_each_micro_batch": "auto", **strategy}
    folds = strategy.get("schedule") == "zbv"  # such a schedule needs the whole weights

    def needed(reshard, each):
        chosen = {"reshard_after_forward": reshard, "reduce_each_micro_batch": each}
        chosen |= {name: value for name, value in asked.items() if value != "auto"}
        whole = replace(settings, layout=run(8, **chosen).layout)
        return *whole.layout.kept, peak_memory(whole, cuda=True).needed

    in_pipeline = "pipeline" in strategy
    order = [(False, False), (True, False), *([] if in_pipeline else [(False, True), (True, True)])]
    fastest_first = [needed(*each) for each in (order[:1] if folds else order)]
    for *_, bytes_needed in fastest_first:
        for spare in (-1e6, 1e6):
            device = bytes_needed + spare + 1e9  # the driver's
            fits = [each for each in fastest_first if each[2] <= device - 1e9]
            layout = resolved(settings, hardware(device)).layout
            found = tuple(layout.kept)
            if in_pipeline or device * KEPT_WHOLE_SHARE >= 4 * sum(w.total for w in weights_of(model)):
                assert found == (fits or fastest_first[-1:])[0][:2]


def test_the_choice_is_planned_and_printed():
    small, large = (make_plan(run(), hardware(size)) for size in (3e8 / 1e2, 80e9))
    sent = [communicated_bytes(plan.settings, cuda=True)["weights gathered, gradients scattered"] for plan in (small, large)]
    blocks, others = 2 * (LINEAR - ROWS * D) + 4 * (VECTORS - D), 2 * ROWS * D + 4 * (ROWS * D + D)
    assert sent[0] == 3 / 4 * 4 * (2 * blocks + others + 4 * WEIGHTS)  # in each of four micro-batches
    assert sent[1] == 3 / 4 * (blocks + others + 4 * WEIGHTS)
    assert "gathers weights once a step, reduces gradients once a step" in markdown(large)
    assert "gathers weights twice a micro-batch, reduces gradients after each micro-batch" in markdown(small)
    frees = [run(reshard_after_forward=True, reduce_each_micro_batch=value) for value in (True, False)]
    each, once = (make_plan(settings, hardware(80e9)).memory.parts["communication buffers"] for settings in frees)
    assert once - each == pytest.approx(4 * WEIGHTS, rel=0.2)
