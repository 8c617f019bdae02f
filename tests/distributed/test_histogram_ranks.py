"""Histograms on several ranks have the counts of numpy.histogram of the whole tensors, and change nothing in training."""

import json
from pathlib import Path

import callback_script
import layouts
import numpy as np
import pytest
from launch import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

SCRIPT = Path(callback_script.__file__)
PIPELINE = {"shard": 1, "pipeline": 2}
TWO = {
    "ddp": {"strategy": "ddp"},
    "fsdp2, bf16": {"strategy": {"shard": 2}, "precision": "bf16-mixed"},
    "fsdp2, uneven": {"strategy": {"shard": 2}, "settings": {"mlp_width": 33}, "model": "olmo"},
    "tp": {"strategy": {"shard": 1, "tensor_parallel": 2}, "micro_batch_size": 4},
    "cp": {"strategy": {"shard": 1, "context": 2}, "micro_batch_size": 4},
    "pp": {"strategy": PIPELINE},
    "pp, tied": {"strategy": PIPELINE, "settings": {"tie_embeddings": True}},
}
FOUR = {"hsdp": {"strategy": {"replicate": 2, "shard": 2}}, "fsdp2-tp": {"strategy": {"shard": 2, "tensor_parallel": 2}}}


@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_every_layout_counts_each_value_once_and_trains_as_without(tmp_path, ranks, jobs):
    (tmp_path / "text.txt").write_text(layouts.TEXT)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, ranks, tmp_path, "histograms", tmp_path / "jobs.json", timeout=600)
    for name in jobs:
        assert all(each[name]["same"] for each in reports), name
        events = EventAccumulator(str(tmp_path / f"events of {name}"), size_guidance={"histograms": 0}).Reload()
        found = {(tag, e.step): e.histogram_value for tag in events.Tags()["histograms"] for e in events.Histograms(tag)}
        whole = {(tag, step): tensor for each in reports for tag, step, tensor in each[name]["rows"]}
        tied = {key for key in whole if "tied" in name and "head" in key[0]}  # the other stage has it as the embedding
        assert set(found) == set(whole) - tied and {step for _, step in found} == {1, 3}, name
        for key, value in found.items():
            expected, edges = np.histogram(whole[key].double().numpy(), 64)
            assert list(value.bucket) == expected.tolist(), (name, key)
            assert [value.min, *value.bucket_limit] == pytest.approx(edges.tolist(), rel=1e-12, abs=1e-15), (name, key)
