"""Which layers and ranks the stages of a pipeline have, and the sentences about what cannot work."""

import re
from itertools import combinations, pairwise, product
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from torch.distributed.pipelining.schedules import get_schedule_class

from lit_llm.config.preflight import callback_problems
from lit_llm.core.errors import UserError
from lit_llm.data import TextFiles
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout import layout_of, layout_problems
from lit_llm.distributed.layout_problems import clip_problem
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig


def slowest(counts: list[int]) -> int:
    """The layers of the slowest stage, with embedding and head as one layer each."""
    return max(counts[0] + 1, *counts[1:-1], counts[-1] + 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("n_layer", [4, 5, 7, 9])
def test_layers_follow_each_other_and_no_other_cut_has_a_faster_slowest_stage(n_layer, stages):
    layers = PipelineLayout(stages).layers(n_layer)
    assert [i for stage in layers for i in stage] == list(range(n_layer))
    cuts = [(0, *inner, n_layer) for inner in combinations(range(1, n_layer), stages - 1)]
    every = [[b - a for a, b in pairwise(cut)] for cut in cuts]
    assert slowest([len(stage) for stage in layers]) == min(map(slowest, every))


def test_of_126_layers_on_16_ranks_the_first_and_the_last_stage_have_one_less():
    """As Llama 3 405B was trained (arXiv 2407.21783, section 3.3.2)."""
    assert [len(stage) for stage in PipelineLayout(16).layers(126)] == [7, *[8] * 14, 7]


def test_given_numbers_of_layers_are_kept_and_the_rest_is_balanced():
    def counts(**given):
        return [len(stage) for stage in PipelineLayout(4, **given).layers(12)]

    assert counts(layers_first=1) == [1, 4, 4, 3]
    assert counts(layers_first=2, layers_last=2) == [2, 4, 4, 2]
    assert counts(layers_last=6) == [1, 2, 3, 6]
    assert PipelineLayout(2, layers_first=3).layers(12) == [range(3), range(3, 12)]


def test_stages_go_round_the_ranks_or_there_and_back():
    assert [PipelineLayout(4, "interleaved1f1b").stages_of(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert PipelineLayout(2, "interleaved1f1b", stages_per_rank=3).stages_of(1) == [1, 3, 5]
    assert [PipelineLayout(4, "zbv").stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("schedule", KINDS)
def test_micro_batches_are_refused_when_torch_refuses_them(schedule):
    for ranks in (2, 3, 4):
        layout = PipelineLayout(ranks, schedule)
        stages = [
            SimpleNamespace(num_stages=layout.stages, stage_index=i, group_size=ranks, group_rank=0, submod=None)
            for i in layout.stages_of(0)
        ]
        for count in range(1, 14):
            try:
                kind = KINDS[schedule]
                get_schedule_class(kind.torch_name)(stages[0] if kind.stages == 1 else stages, count)
            except ValueError:
                refused = True
            else:
                refused = False
            assert layout.runs(count) != refused, (ranks, count)


MODEL = {"n_layer": 4, "vocab_size": 300}


def problems(model=None, architecture=None, compute=None, precision="32-true", loss=None, **strategy):
    config = GPTConfig(**{**MODEL, **(model or {})})
    given = {"shard": 1, **strategy}
    world = given.get("pipeline", 1) * given["shard"] * given.get("tensor_parallel", 1)
    mesh = MeshStrategy(**given)
    return layout_problems(mesh, layout_of(mesh, world, 8), config, architecture, compute, precision, loss)


REFUSED = [
    ({"pipeline": 8}, "model.n_layer is 4 (--model.n_layer 8, or --trainer.strategy.pipeline 4)"),
    ({"pipeline": 4, "schedule": "interleaved1f1b"}, "or --trainer.strategy.schedule 1f1b"),
    ({"pipeline": 3, "layers_first": 3}, "leave 1 of 4 layers (model.n_layer) to 2 other stages"),
    ({"pipeline": 2, "layers_first": 4}, "(--trainer.strategy.layers_first null)"),
    ({"pipeline": 8, "layers_first": 3}, "or a smaller --trainer.strategy.pipeline)"),
    ({"pipeline": 3, "layers_first": 3, "layers_last": 3}, "leave 0 of 4 layers (model.n_layer) to 1 other stage"),
    (
        {"pipeline": 2, "layers_first": 1, "layers_last": 2},
        "(--trainer.strategy.layers_first null --trainer.strategy.layers_last null)",
    ),
    ({"pipeline": 2, "precision": "16-mixed"}, "do not share a loss scale (--trainer.precision bf16-mixed)"),
    ({"pipeline": 2, "schedule": "zbv", "compute": ComputeConfig(compile=True)}, "(--trainer.strategy.schedule 1f1b or"),
    ({"pipeline": 2, "schedule": "zbv", "loss": LossConfig(chunk_size=8)}, "--loss.chunk_size null"),
    (
        {"pipeline": 2, "schedule": "zbv", "compute": ComputeConfig(activation_checkpointing="cheap")},
        "--compute.activation_checkpointing full",
    ),
    ({"pipeline": 2, "schedule": "zbv", "tensor_parallel": 2}, "--trainer.strategy.tensor_parallel 1"),
    ({"pipeline": 2, "schedule": "zbv", "shard": 2, "reshard_after_forward": True}, "reshard_after_forward false"),
    ({"pipeline": 2, "schedule": "zbv", "model": {"tie_embeddings": True}}, "--model.tie_embeddings false"),
    ({"pipeline": 2, "architecture": Architecture("mine.LSTM")}, "mine.LSTM cannot be cut between its layers"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_what_cannot_work_is_one_sentence_with_what_does(settings, sentence):
    found = problems(**settings)
    assert len(found) == 1 and sentence in found[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbv"])
def test_what_cannot_be_cut_is_refused_and_the_proposed_flags_work(schedule):
    """Every cut into positive numbers of layers is tried. The flags of each sentence are read and applied."""
    given = [None, 1, 2, 3, 6]
    refused = 0
    for ranks, n_layer, first, last in product((2, 3, 4), (2, 4, 5, 9), given, given):
        layout = PipelineLayout(ranks, schedule, layers_first=first, layers_last=last)
        cuts = combinations(range(1, n_layer), layout.stages - 1)
        sizes = ([b - a for a, b in pairwise((0, *cut, n_layer))] for cut in cuts)
        can_cut = any(first in (None, each[0]) and last in (None, each[-1]) for each in sizes)
        found = layout.layer_problems(n_layer)
        assert bool(found) != can_cut
        for sentence in found:
            flags = dict(re.findall(r"--(?:model|trainer.strategy)\.(n_layer|layers_\w+) (\w+)", sentence))
            enough = int(flags.pop("n_layer", n_layer))
            assert enough > n_layer or flags
            assert layout._replace(**dict.fromkeys(flags)).layers(enough)
            refused += 1
    assert refused > 50


def test_a_step_gets_as_many_micro_batches_as_the_stages_or_is_refused_before_the_run():
    data = TextFiles(paths=[], micro_batch_size=2, global_batch_size=8, block_size=8)
    missing = data.problems(1)
    data.find_pipeline(MeshStrategy(pipeline=4, shard=2))
    assert (data.problems(1), data.samples.micro_batch(0)) == (missing, 2)
    data.global_batch_size = 4
    assert (data.problems(1), data.samples.micro_batch(0), data.samples.micro_batches(0)) == (missing, 1, 4)
    (problem,) = set(data.problems(2)) - set(missing)
    assert "needs at least 4 micro-batches in a step, but it has 2" in problem
    assert problem.endswith("use 8 (--data.global_batch_size).")
    data.find_pipeline(MeshStrategy(shard=2))
    assert data.problems(2) == missing


def test_the_trainer_does_not_clip_each_stage_by_its_own_norm():
    assert "--gradient_norm.clip 0.5" in clip_problem(2, 0.5)
    assert clip_problem(1, 0.5) is None and clip_problem(2, None) is None
    strategy = MeshStrategy(pipeline=2, shard=1)
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=2, gradient_clip_val=0.5, logger=False)
    with pytest.raises(UserError, match="clip"):
        strategy.setup(trainer)
    assert any("gradient_clip_val is 0.5" in problem for problem in callback_problems(trainer))
