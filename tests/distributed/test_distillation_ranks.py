"""Distillation on two gloo processes, compared with one."""

from __future__ import annotations

import json
from pathlib import Path

import layouts
import numpy as np
import pytest
import torch
from launch import run_ranks

from lit_llm.data import Bytes, TokenShards
from lit_llm.data.teacher import TeacherInfo, TeacherWriter
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter

SCRIPT = Path(layouts.__file__)
SIZE, T, K, TEMPERATURE = Bytes().vocab_size, layouts.SIZE["block_size"], 5, 2.0
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": {"shard": 2}},
    "tp": {"strategy": {"shard": 1, "tensor_parallel": 2}},
    "tp, chunked": {"strategy": {"shard": 1, "tensor_parallel": 2}, "loss": {"chunk_size": 5}},
    "cp": {"strategy": {"shard": 1, "context": 2}},
    "pp": {"strategy": {"shard": 1, "pipeline": 2}},
}


def write_taught(folder: Path) -> None:
    """Text in shards of 301 tokens, which cut blocks, and a random teacher's top k."""
    draw, splits = np.random.default_rng(0), {}
    text = Bytes().encode(layouts.TEXT)
    for name, tokens in (("train", text[:3000]), ("val", text[3000:3400])):
        with ShardWriter(folder, name, vocab_size=SIZE, shard_tokens=301) as writer:
            writer.write(tokens)
            writer.end_document()
        sizes = writer.tokens, writer.tokens, 0, writer.tokens
        splits[name] = SplitInfo(writer.documents, *sizes, writer.tokens_blake2b, tuple(writer.shards))
    Manifest("bytes", SIZE, None, None, splits).write(folder)
    Bytes().save(folder)
    data = TokenShards(path=str(folder), block_size=T)
    data.setup()
    stream = data.corpus.streams["train"]
    writer = TeacherWriter(stream, TeacherInfo("0" * 64, SIZE, K, TEMPERATURE, T, "concatenate", stream.scan(SIZE), {}))
    z = torch.from_numpy(draw.standard_normal((len(stream), SIZE)) + 3 * draw.standard_normal(SIZE))  # favours some ids
    logp, ids = torch.log_softmax(z / TEMPERATURE, dim=-1).topk(K)
    writer.write(0, ids.numpy(), logp.numpy())
    writer.finish()


def recipe(**more) -> dict:
    return {"taught": {"weight": 0.6}, "precision": "64-true", "parameters": True, "steps": 4} | more


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    (tmp_path / "text.txt").write_text(layouts.TEXT)
    (tmp_path / "taught").mkdir()
    write_taught(tmp_path / "taught")
    expected = layouts.train(tmp_path, **recipe())
    plain = layouts.train(tmp_path, **recipe(taught={"weight": 0.0}))
    assert expected["train/loss"][0] == plain["train/loss"][0] and expected["train/loss"][3] > plain["train/loss"][3]
    assert expected["means"]["train/kl"][3] < plain["means"]["train/kl"][3]
    jobs = {name: recipe(**layout) for name, layout in LAYOUTS.items()}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    for report in run_ranks(SCRIPT, 2, tmp_path, tmp_path / "jobs.json", timeout=500):
        for name, found in report.items():
            for key in ("train/loss", "grad/norm"):
                assert found[key] == pytest.approx(expected[key], rel=1e-6), (name, key)
            assert found["means"]["train/kl"] == pytest.approx(expected["means"]["train/kl"], rel=1e-6), name
            assert found["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-6), name
            for parameter, value in found["parameters"].items():
                torch.testing.assert_close(value, expected["parameters"][parameter], rtol=1e-6, atol=1e-9, msg=name)
