"""Ranks that share each sequence compute what one process does. Losses of training: test_strategies.py."""

from pathlib import Path

import context_script
import pytest
import torch
from context_script import BATCH, MODELS, SIZE
from launch import run_ranks

from lit_llm.core.errors import UserError
from lit_llm.distributed.layout import layout_of, layout_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.sequence_shard import SequenceShard


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_rank_has_its_positions_and_as_much_causal_work_as_the_others(ranks):
    length = 2 * ranks * 5
    position = torch.arange(length)[None]
    for kind in ("gather", "heads"):
        parts = [SequenceShard("", ranks, rank, kind).take(position)[0].tolist() for rank in range(ranks)]
        assert sorted(p for part in parts for p in part) == list(range(length))
        assert all(part == sorted(part) and len(part) == length // ranks for part in parts)
        if kind == "gather":  # position p meets p + 1 keys
            assert len({sum(p + 1 for p in part) for part in parts}) == 1
    assert SequenceShard("", 4, 1).take(torch.arange(16)[None]).tolist() == [[2, 3, 12, 13]]


def problems(strategy, world, architecture=None, **model):
    mesh = MeshStrategy(shard=1, **strategy)
    return layout_problems(mesh, layout_of(mesh, world, 8), GPTConfig(**{**SIZE, **model}), architecture)


def test_what_cannot_be_shared_is_refused_with_the_nearest_setting_that_works():
    assert problems({"context": 4}, 4) == []
    assert problems({"context": 4, "context_attention": "heads"}, 4) == []
    assert problems({"context": 8, "context_attention": "heads"}, 8) == [
        "context_attention is heads, but context=8 does not divide model.n_kv_head = 4: use "
        "--trainer.strategy.context_attention gather, or --trainer.strategy.context 4"
    ]
    assert problems({"context": 4, "tensor_parallel": 2, "context_attention": "heads"}, 8) == [
        "context_attention is heads, but context=4 does not divide model.n_kv_head / tensor_parallel = 4 / 2: use "
        "--trainer.strategy.context_attention gather, or --trainer.strategy.context 2"
    ]
    assert problems({"context": 8}, 8, block_size=6) == [
        "context=8, but a sequence has 6 positions (model.block_size): use at most --trainer.strategy.context 6"
    ]
    (sentence,) = problems({"context": 2}, 2, Architecture("my.Model"))
    assert "my.Model" in sentence and "--trainer.strategy.context 1" in sentence
    with pytest.raises(UserError, match="context_attention is ring, but must be gather or heads"):
        MeshStrategy(context=2, context_attention="ring")  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    return run_ranks(Path(context_script.__file__), request.param, tmp_path_factory.mktemp("context"))


@pytest.mark.slow
def test_sums_and_gradients_of_models_equal_one_process(ranks):
    for each in ranks:
        for case, differences in each["models"].items():
            assert differences["sums"] < 1e-10, case  # float64: sums of 80 losses of size 4
            assert differences["gradients"] < 1e-10, case


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_formulas(ranks):
    n, layers, kv, head = len(ranks), SIZE["n_layer"], SIZE["n_kv_head"], SIZE["n_embd"] // SIZE["n_head"]
    padded = 40  # of 39 positions, for 2 and 4 ranks
    for each in ranks:
        for name, dtype in (("torch.float32", 4), ("torch.bfloat16", 2)):
            whole = 2 * BATCH * padded * kv * head * dtype  # keys and values of a layer
            found = each["traffic"][f"gather, {name}"]
            assert found["forward"] == [("all_gather", layers, layers * whole)]
            assert found["backward"] == [("all_to_all", layers, layers * whole)]
            latent = MODELS["latent"]["latent"]
            found = each["traffic"][f"latent, gather, {name}"]
            whole = BATCH * padded * (latent["kv_rank"] + latent["rope_head_dim"]) * dtype
            assert found["forward"] == [("all_gather", layers, layers * whole)]
            assert found["backward"] == [("all_to_all", layers, layers * whole)]
            found = each["traffic"][f"latent, heads, {name}"]  # values are padded to the width of keys, 10
            whole = 4 * BATCH * padded * SIZE["n_head"] * 10 * dtype // n
            assert found["forward"] == found["backward"] == [("all_to_all", 2 * layers, layers * whole)]
            exchanged = 2 * BATCH * padded * (SIZE["n_head"] + kv) * head * dtype // n
            found = each["traffic"][f"heads, {name}"]
            assert found["forward"] == found["backward"] == [("all_to_all", 2 * layers, layers * exchanged)]
