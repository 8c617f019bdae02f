"""Plans of pipelines and of ranks that share sequences."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.plan import Layout, Optimizer, RunSettings, find, make_plan, memory_per_rank, total_parameters
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.pipeline import in_flight, shares, weights_of_stages
from lit_llm.plan.rank_traffic import communicated_bytes
from lit_llm.plan.settings import STRATEGIES, layout_from_strategy

MODEL = GPTConfig(n_layer=8, n_head=4, n_embd=64, block_size=64, vocab_size=512)
ADAMW = Optimizer("AdamW", fused=True)


def most_in_flight(order):
    """By stage, micro-batches between forward and their last backward pass, when they are most, in torch's list of actions."""
    live, most = Counter(), Counter()
    for action in order:
        for each in () if action is None else (action.sub_actions or (action,)):
            name = each.computation_type.name
            live[each.stage_index] += name == "FORWARD"
            if sum(live.values()) > sum(most.values()):
                most = Counter(live)
            live[each.stage_index] -= name in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    return most


@pytest.mark.parametrize("micro_batches", [8, 16])
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv", "dualpipev"])
def test_activations_in_flight_are_those_of_torchs_schedules(schedule, micro_batches):
    layout, x = PipelineLayout(4, schedule), torch.empty(1, device="meta")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        stages = [
            PipelineStage(nn.Identity(), stage, layout.stages, torch.device("cpu"), input_args=x, output_args=x)
            for stage in layout.stages_of(0)
        ]
        orders = get_schedule_class(KINDS[schedule].torch_name)(stages, micro_batches, loss_fn=lambda y, _: y).pipeline_order
    finally:
        dist.destroy_process_group()
    for rank in range(4):
        most, planned = most_in_flight(orders[rank]), in_flight(layout, rank, micro_batches)
        assert sum(planned.values()) == sum(most.values()), (rank, planned, most)


def test_activations_in_flight_of_gpipe_and_1f1b():
    assert [in_flight(PipelineLayout(4, "gpipe"), rank, 6) for rank in range(4)] == [{r: 6} for r in range(4)]
    assert [in_flight(PipelineLayout(4), rank, 6) for rank in range(4)] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert in_flight(PipelineLayout(4), 0, 2) == {0: 2}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_ranks_of_a_pipeline_hold_the_model_once(schedule, tied):
    model = GPTConfig(n_layer=8, n_head=4, n_embd=64, block_size=64, vocab_size=512, tie_embeddings=tied, position="learned")
    layout = PipelineLayout(2, schedule)
    held = [weights_of_stages(weights_of(model), shares(layout, 8, rank, 4)) for rank in range(2)]
    copies = 512 * 64 if tied and schedule == "1f1b" else 0  # on the first and on the last rank
    assert sum(weight.total for each in held for weight in each) == total_parameters(model) + copies


def test_memory_of_a_pipeline_grows_with_what_is_in_flight():
    def total(schedule, micro_batches, ranks=4):
        layout = Layout("mesh", pipeline=PipelineLayout(ranks, schedule))
        return memory_per_rank(MODEL, sequences=4, accumulation=micro_batches, optimizer=ADAMW, layout=layout)

    assert total("1f1b", 16).total < total("gpipe", 16).total
    whole = memory_per_rank(MODEL, sequences=4, accumulation=16, optimizer=ADAMW)
    half = total("1f1b", 16, ranks=2)
    assert half.parts["weights"] < 0.6 * whole.parts["weights"]
    # GPipe holds each further micro-batch: activations, ids, and torch's two buffers of 4 · 64 · 64 fp32 values.
    more = total("gpipe", 17).total - total("gpipe", 16).total
    assert more == total("gpipe", 18).total - total("gpipe", 17).total > 4 * 64 * 64 * 4 * 2


def test_the_first_rank_of_a_tied_pipeline_has_nothing_of_the_loss():
    tied = replace(MODEL, tie_embeddings=True)
    layout = Layout("mesh", pipeline=PipelineLayout(2, "interleaved1f1b"))
    memory = memory_per_rank(tied, sequences=4, accumulation=8, optimizer=ADAMW, layout=layout)  # most is on rank 0
    assert memory.moment == "backward" and "loss head" not in memory.parts and min(memory.parts.values()) > 0


def settings(layout, **changes):
    values = {"steps": 1, "global_batch": 16, "micro_batch": 1, "layout": layout, **changes}
    return RunSettings(MODEL, ADAMW, **values)


def test_bytes_between_stages_and_between_ranks_of_a_sequence():
    moved = 64 * 64 * 4  # positions · width, fp32
    middle = communicated_bytes(settings(Layout("mesh", pipeline=PipelineLayout(4))), cuda=False)
    assert middle == {"activations between stages": 16 * 2 * moved}  # forward and back, of each micro-batch
    folded = communicated_bytes(settings(Layout("mesh", pipeline=PipelineLayout(4, "zbv"))), cuda=False)
    assert folded == {"activations between stages": 16 * 4 * moved}
    shared = communicated_bytes(settings(Layout("mesh", context=2, shards="parameters")), cuda=False)
    # (n - 1) / n of keys and values of 8 layers, forward and backward
    assert shared["keys and values between ranks of a sequence"] == 16 * 8 * 2 * 1 / 2 * 2 * moved


def mesh(**sizes):
    return {"class_path": "lit_llm.distributed.mesh_strategy.MeshStrategy", "init_args": sizes}


def test_a_mesh_of_all_dimensions_is_planned():
    layout = layout_from_strategy(mesh(pipeline=2, context=2, tensor_parallel=2, replicate=2, shard=2), 32, 8)
    assert layout.devices == 32 and layout.stage_ranks == 16 and layout.divisor("parameters") == 4
    plan = make_plan(settings(layout, global_batch=32), find("h100-sxm"))
    assert plan.times.step and plan.memory.total


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
        one = layout_from_strategy(name, 8, 8)
        assert (one.pipeline.ranks, one.replicate, one.shard, one.context, one.tensor_parallel) == expected, name
    overlays = {path.stem for path in (Path(__file__).parents[2] / "recipes/strategy").glob("*.yaml")}
    assert overlays <= set(STRATEGIES)


@pytest.mark.parametrize(
    ("sizes", "devices", "said"),
    [
        ({"pipeline": 16}, 16, "16 stages of at least one layer, but model.n_layer is 8"),
        ({"pipeline": 4, "shard": 8}, 32, "needs at least 4 micro-batches in a step, but it has 2"),
        ({"context": 8, "context_attention": "heads"}, 8, "context=8 does not divide model.n_head = 4"),
        ({"pipeline": 2, "context": 3}, 8, "needs a multiple of 6 processes, but the run has 8: use 6 or 12"),
        ({"pipeline": 2, "schedule": "zbv", "tensor_parallel": 2}, 4, "loss of tensor_parallel=2 computes both at once"),
        ({"pipeline": 2, "schedule": "zbv", "reshard_after_forward": True}, 4, "reshard_after_forward true frees the weights"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_a_sentence(sizes, devices, said):
    with pytest.raises(ValueError, match=said):
        make_plan(settings(layout_from_strategy(mesh(**sizes), devices, 8)), find("h100-sxm"))
