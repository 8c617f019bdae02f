"""The first batch as text, against the batches that a Trainer gets and against texts written by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from recorder import T, fit, write
from test_masked_targets import MASK, TOKENS, folder_with_masks

from lit_llm.callbacks import BatchRamp
from lit_llm.data import Bytes, Mixture, MixturePhase, MixtureSource, TokenShards
from lit_llm.data.first_batch import first_batch
from lit_llm.ingest.shards import ShardWriter


def ids(lines, name="inputs"):
    """(B, T) token ids of the lines, which are of data without a tokenizer and without documents."""
    return [[int(each) for each in line.split()[1:]] for line in lines if line.startswith(f"    {name}")]


@pytest.mark.parametrize("case", ["plain", "ramp", "packed"])
def test_the_lines_are_the_batch_that_a_trainer_reads_first(shards, tmp_path, case):
    callbacks = [BatchRamp([[0, 4 * T], [8 * T, 6 * T]])] if case == "ramp" else []
    settings = {"micro_batch_size": 2} | ({"packing": "best_fit"} if case == "packed" else {})
    if case == "packed":
        for path in tmp_path.glob("train_*"):
            path.unlink()
        with ShardWriter(tmp_path, "train", vocab_size=1000, shard_tokens=1000) as writer:
            for start in range(0, 200, 20):
                writer.write(np.arange(start, start + 20))
                writer.end_document()
    run, _ = fit(tmp_path, shards(**settings), callbacks=callbacks, max_steps=2)
    batches = [batch for batch, step in zip(run.seen, run.steps, strict=True) if step == 0]
    data = shards(**settings)
    data.find_ramp(callbacks)
    size, lines = (4 if case == "ramp" else 6), list(first_batch(data, 100))  # more than there are
    assert lines[0].startswith(f"first batch of a new run: {size} sequences of {T} tokens")
    assert [line for line in lines if line.startswith("sequence")] == [f"sequence {i + 1}" for i in range(size)]
    read = torch.cat([batch["input_ids"] for batch in batches])
    if case == "packed":  # whole documents of 20 are cut into 8, 8 and 3 pairs; the rest of a block is padding
        shown = [i for row in ids(lines) for i in row]
        kept = torch.cat([batch["targets"] for batch in batches]) != -100
        assert shown == read[kept].tolist() and [i for row in ids(lines, "targets") for i in row] == [i + 1 for i in shown]
        assert lines.count("  padding: 2 tokens") + lines.count("  padding: 5 tokens") == sum(not row.all() for row in kept)
    else:
        assert ids(lines) == read.tolist() and ids(lines, "targets") == (read + 1).tolist()
        assert ids(first_batch(data, 2)) == read[:2].tolist()


def test_a_mixture_says_the_source_of_each_sequence(tmp_path):
    sources = {}
    for name, first in (("web", 0), ("code", 500)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "train", first + np.arange(121))
        write(tmp_path / name, "val", first + np.arange(30))
        sources[name] = MixtureSource(train=f"{tmp_path}/{name}/train_*.bin", val=f"{tmp_path}/{name}/val_*.bin")

    def mixture():  # the first phase ends within the batch of the second step
        phases = [MixturePhase({"web": 0.5, "code": 0.5}, 0.15), MixturePhase({"code": 1.0}, 1.0)]
        return Mixture(sources=sources, phases=phases, block_size=T, global_batch_size=6, vocab_size=1000, seed=3)

    run, _ = fit(tmp_path, mixture(), max_steps=10)
    data = mixture()
    data.find_run(max_steps=10, max_epochs=-1, saved=None)
    lines = list(first_batch(data, 6))
    assert ids(lines) == run.seen[0]["input_ids"].tolist()
    found = [re.fullmatch(r"sequence \d, source (\w+)", line) for line in lines if line.startswith("sequence")]
    assert [match and match[1] for match in found] == ["code" if row[0] >= 500 else "web" for row in ids(lines)]


def test_masked_targets_are_counted_outside_of_the_quotes(tmp_path):
    folder = folder_with_masks(tmp_path / "shards")  # prompts of three ids, answers of two and their end
    data = TokenShards(path=str(folder), block_size=12, packing="best_fit", global_batch_size=5)
    lines = list(first_batch(data, 5))
    assert "  document 1: 5 tokens" in lines and "  document 2: 5 tokens" in lines  # two documents, and 2 of padding
    assert "  padding: 2 tokens" in lines
    decoded = Bytes().decode(TOKENS[3:6])  # the answer: the first target that counts is its first token
    assert MASK[:6] == [0, 0, 0, 1, 1, 1] and f"    targets  [2 masked] {decoded!r}" in lines
    assert f"    inputs   {Bytes().decode(TOKENS[:5])!r}" in lines
