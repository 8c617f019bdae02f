"""Mixtures with phases and a batch ramp: killed runs, and runs on several ranks, read the same samples.

One has three sources of consecutive tokens. The other packs whole documents, some of which are conversations.
"""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

import matrix
import numpy as np
import pytest
from run_comparison import LEDGER, ledger

from lit_llm.data.mixture_order import MixtureOrder, Phase
from lit_llm.ingest.shards import ShardWriter

T = 16
STEPS = [6] * 5 + [12] * 15  # sequences; 210 in all
ENDS = (94, 168, 210)  # of the phases: 0.45, 0.8 and 1 of 210 samples, none at the end of a step
SIZES = {"web": 120, "code": 31, "books": 9}  # blocks: web is not read once, books several times
RECIPE = """
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: Mixture
  init_args:
    sources:
      web: {train: web/train_*.bin, val: web/val_*.bin, max_epochs: 1}
      code: {train: code/train_*.bin}
      books: {train: books/train_*.bin, val: books/val_*.bin}
    phases:
    - {until: 0.45, weights: {web: 80, code: 20}}
    - {until: 0.8, weights: {web: 20, code: 45, books: 35}}
    - {until: 1, weights: {books: 100}}
    vocab_size: 257
    global_batch_size: 12
    micro_batch_size: 1
batch_ramp: {tokens_per_batch: [[0, 96], [480, 192]]}
validation: {every_n_steps: 4}
checkpoint: {every_n_steps: 3, keep_every_n_steps: 10}
trainer:
  max_steps: 20
  log_every_n_steps: 1
  accelerator: cpu
  callbacks: [{class_path: sample_ledger.SampleLedger}]
"""


class Layout(NamedTuple):
    """Duck type of `matrix.Cell`."""

    ranks: int
    workers: int = 0

    @property
    def straight(self) -> str:
        return f"on-{self.ranks}"

    def flags(self) -> list[str]:
        overlay = matrix.OVERLAYS / "ddp.yaml"
        return [] if self.ranks == 1 else ["--config", str(overlay), "--trainer.devices", str(self.ranks)]

    def other_flags(self) -> list[str]:
        return ["--data.num_workers", str(self.workers)] if self.workers else []


def tokens_of(name: str) -> np.ndarray:
    return np.random.default_rng(sum(name.encode())).integers(0, 257, SIZES[name] * T + 1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "recipe.yaml").write_text(RECIPE)
    for name in SIZES:
        (folder / name).mkdir()
        for split, tokens in (("train", tokens_of(name)), ("val", np.arange(40))):
            with ShardWriter(folder / name, split, vocab_size=257, shard_tokens=500) as writer:
                writer.write(tokens)
    return folder


def expected(phases: list[Phase], rows: dict[str, list[np.ndarray]]) -> dict[int, list[int]]:
    """The checksums of every step, from the definition of the order and the blocks of each source."""
    order = MixtureOrder(phases, sizes={name: len(blocks) for name, blocks in rows.items()}, seed=0)
    names, steps, start = list(rows), {}, 0
    for step, size in enumerate(STEPS, 1):
        addresses = order.locate(np.arange(start, start + size)).tolist()
        read = [rows[names[source]][block] for source, block in addresses]
        steps[step] = [zlib.crc32(row.astype(np.int64).tobytes()) for row in read]
        start += size
    return steps


def read_by(run) -> dict[int, list[int]]:
    """The checksums of each step's samples in global order: rank after rank."""
    ranks = [ledger(run, rank) for rank in range(len(list(run.glob(LEDGER.format("*")))))]
    return {step: [checksum for rank in ranks for checksum in rank[step]] for step in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(1, workers=2), pytest.param(Layout(2), marks=pytest.mark.soak), Layout(3)],
    ids=lambda layout: f"{layout.ranks} ranks",
)
def test_a_killed_run_on_any_number_of_ranks_reads_every_sample_of_the_order(launcher, mixture, layout):
    quotas = ({"web": 4, "code": 1}, {"web": 4, "code": 9, "books": 7}, {"books": 1})
    rows = {name: list(tokens_of(name)[:-1].reshape(-1, T)) for name in SIZES}
    samples = expected([Phase(end, each) for end, each in zip(ENDS, quotas, strict=True)], rows)
    result = matrix.run_cell(launcher, layout, mixture, {}, kills=2, rng=random.Random(layout.ranks))
    assert result.differing == 0, "\n".join(result.found)
    assert result.kills >= 1 and result.values > 400
    assert read_by(mixture / layout.straight) == samples
    assert read_by(mixture / f"{layout.straight}-{layout.workers}") == samples
