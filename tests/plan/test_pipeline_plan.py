"""Plans of pipelines and of ranks that share sequences."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_steps import peak_of
from torch.profiler import ProfilerActivity, profile

from lit_llm.core._torch import gradients_of_inputs
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallel_layout import STRATEGIES, layout_of_name
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_order import orders, shares
from lit_llm.models.config import GPTConfig
from lit_llm.models.gpt import GPT
from lit_llm.plan import Layout, Optimizer, PlannedRun, find, make_plan, total_parameters
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.micro_batch import micro_batch as micro_batch_cache
from lit_llm.plan.weights import weights_of, weights_of_stages

MODEL = GPTConfig(n_layer=8, n_head=4, n_embd=64, block_size=64, vocab_size=512)
DEEP = GPTConfig(n_head=4, n_embd=64, block_size=64, vocab_size=64)
ADAMW = Optimizer("AdamW", fused=True)


ORDERS = {  # of ranks 0 and 1 with 4 micro-batches: F forward, B backward, I and W gradients of inputs and of weights
    "1f1b": ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"),
    "gpipe": ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"),
    "interleaved1f1b": (  # Narayanan et al. 2021, figure 4
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ),
    "zbv": (  # Qi et al. 2024
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ),
}
LETTERS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


@pytest.mark.parametrize("schedule", ORDERS)
def test_the_order_of_actions_is_that_of_the_schedule(schedule):
    found = orders(PipelineLayout(2, schedule), 4)
    for rank, written in zip(found, ORDERS[schedule], strict=True):
        assert [task for group in rank for task in group] == [(LETTERS[w[1]], int(w[0]), int(w[2])) for w in written.split()]


def live_bytes(n_layer):
    """Of a real model: after its forward pass, and with the gradients of the first block's input, before those of weights."""
    model, received = GPT(replace(DEEP, n_layer=n_layer)), []
    model.init_weights()
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: received.append(inputs[0]))
    ids = torch.randint(0, 64, (2, 64))

    def live(log):
        todo, found = [*log.profiler.kineto_results.experimental_event_tree()], 0
        while todo:
            event = todo.pop()
            found += event.extra_fields.alloc_size if event.name == "[memory]" else 0
            todo += event.children
        return found

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = model(ids, ids).loss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        kept = gradients_of_inputs([loss], received, model.parameters())
    assert kept
    return live(forward), live(backward)


@pytest.fixture(scope="module")
def of_a_block():
    """What a block keeps between its passes, and what it adds between the gradients of inputs and those of weights."""
    return [more - less for more, less in zip(live_bytes(3), live_bytes(2), strict=True)]


def held_most(order, blocks, forward, inputs):
    """The most that an order of actions holds, counted by hand. `blocks` of each stage. The first stage does all at W."""
    live, found = 0, []
    for stage, kind, _ in order.split():
        keeps = forward + (inputs if kind == "W" and stage != "0" else 0)
        adds = {"F": forward, "I": 0 if stage == "0" else inputs, "B": -keeps, "W": -keeps}
        live += blocks[int(stage)] * adds[kind]
        found.append(live)
    assert live == 0
    return max(found)


@pytest.mark.parametrize("schedule", ORDERS)
def test_activations_are_those_that_the_order_keeps(of_a_block, schedule):
    layout = Layout("mesh", pipeline=PipelineLayout(2, schedule))
    deep = replace(DEEP, n_layer=8 * layout.pipeline.stages)
    memory = peak_of(deep, sequences=2, accumulation=4, optimizer=ADAMW, layout=layout, precision="32-true", cuda=False)
    blocks = [len(layers) for layers in layout.pipeline.layers(deep.n_layer)]
    kept = max(held_most(order, blocks, *of_a_block) for order in ORDERS[schedule])
    buffers = 4 * 2 * 64 * 64 * 4 * (1 if layout.pipeline.stages == 2 else 4)
    held = memory.parts["activations"] + memory.parts.get("loss head", 0) - buffers
    assert held == pytest.approx(kept, rel=0.06)  # besides one operation, and what is being sent


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_ranks_of_a_pipeline_hold_the_model_once(schedule, tied):
    model = GPTConfig(n_layer=8, n_head=4, n_embd=64, block_size=64, vocab_size=512, tie_embeddings=tied, position="learned")
    layout = PipelineLayout(2, schedule)
    held = [weights_of_stages(weights_of(model), shares(layout, 8, rank)) for rank in range(2)]
    copies = 512 * 64 if tied and schedule == "1f1b" else 0  # on the first and on the last rank
    assert sum(weight.total for each in held for weight in each) == total_parameters(model) + copies


@pytest.mark.parametrize(("schedule", "ranks"), [("zbv", 4), ("dualpipev", 2), ("interleaved1f1b", 4), ("1f1b", 4)])
def test_a_step_of_many_micro_batches_takes_what_one_of_fewer_does(schedule, ranks, monkeypatch):
    def activations(cuda):
        layout = Layout("mesh", pipeline=PipelineLayout(ranks, schedule))
        model = replace(DEEP, n_layer=2 * layout.pipeline.stages)
        of_ranks = peak_of(model, sequences=1, accumulation=40, optimizer=ADAMW, layout=layout, cuda=cuda)
        return of_ranks.parts["activations"]

    short = [activations(cuda) for cuda in (True, False)]
    monkeypatch.setattr("lit_llm.plan.micro_batch.micro_batches_to_play", lambda layout, micro_batches: micro_batches)
    micro_batch_cache.cache_clear()
    assert short == pytest.approx([activations(cuda) for cuda in (True, False)], rel=0.01)


def settings(layout, **changes):
    values = {"max_steps": 1, "global_batch_size": 16, "micro_batch_size": 1, "layout": layout, **changes}
    return PlannedRun(MODEL, ADAMW, **values)


def test_bytes_between_stages_and_between_ranks_of_a_sequence():
    moved = 64 * 64 * 4  # positions · width, fp32
    middle = communicated_bytes(settings(Layout("mesh", pipeline=PipelineLayout(4))), cuda=False)
    assert middle == {"activations between stages": 16 * 2 * moved}  # forward and back, of each micro-batch
    folded = communicated_bytes(settings(Layout("mesh", pipeline=PipelineLayout(4, "zbv"))), cuda=False)
    assert folded == {"activations between stages": 16 * 4 * moved}
    shared = communicated_bytes(settings(Layout("mesh", context=2)), cuda=False)
    # (n - 1) / n of keys and values of 8 layers, forward and backward
    assert shared["between ranks of a sequence"] == 16 * 8 * 2 * 1 / 2 * 2 * moved


def mesh(devices, **sizes):
    return layout_of(MeshStrategy(**sizes), devices, 8)


def test_a_pipeline_waits_and_its_largest_micro_batch_is_one_that_runs():
    plan = make_plan(settings(Layout("mesh", pipeline=PipelineLayout(4))), find("h100-sxm"))  # 16 micro-batches of 1
    assert plan.largest_micro_batch == 4  # 8 sequences would be 2 micro-batches, but 4 stages need 4
    working = plan.times.compute + plan.times.exposed
    assert plan.times.step == pytest.approx(working / (1 - 3 / 19))  # idle: (S - 1) / (M + S - 1)


def test_a_sweep_knows_the_overlays_of_all_dimensions():
    sizes = {
        "pp": (8, 1, 1, 1, 1), "fsdp2-pp": (2, 1, 4, 1, 1), "cp": (1, 1, 1, 8, 1), "fsdp2-cp": (1, 1, 4, 2, 1),
        "3d": (2, 1, 2, 1, 2), "4d": (2, 1, 1, 2, 2),
    }  # fmt: skip
    for name, expected in sizes.items():
        one = layout_of_name(name, 8, 8)
        assert (one.pipeline.ranks, one.replicate, one.shard, one.context, one.tensor_parallel) == expected, name
    overlays = {path.stem for path in (Path(__file__).parents[2] / "recipes/strategy").glob("*.yaml")}
    assert overlays <= set(STRATEGIES)
