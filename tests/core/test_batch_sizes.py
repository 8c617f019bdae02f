"""Micro-batches follow from the batch and the ranks. Expected sizes: by hand, and by trying every size."""

import re
from itertools import product

import pytest

from lit_llm.core.batch_sizes import batch_problem, micro_batch, small_note
from lit_llm.distributed.pipeline_layers import PipelineLayout


@pytest.mark.parametrize(
    ("batch", "most", "ranks", "expected"),
    [
        (32, 8, 1, 8),  # what divides is taken as it is
        (32, 8, 4, 8),
        (512, 4, 8, 4),
        (8, 8, 2, 4),  # quickstart
        (8, 8, 8, 1),
        (100, 12, 1, 10),
        (14, 6, 2, 1),
        (30, None, 3, 10),
        (8, 8, 3, 0),
        (2, 8, 4, 0),
    ],
)
def test_a_micro_batch_is_the_largest_part_of_a_ranks_share(batch, most, ranks, expected):
    assert micro_batch(batch, most, ranks) == expected


# Micro-batches of a step that torch's schedules run, from their sources: 1F1B and DualPipeV refuse fewer than they have stages;
# Interleaved1F1B wants a multiple of its rounds, which are the micro-batches over the ranks, rounded down.
RUNS = {
    "1f1b": lambda count, ranks: count >= ranks,
    "dualpipev": lambda count, ranks: count >= 2 * ranks,
    "interleaved1f1b": lambda count, ranks: count < ranks or count % (count // ranks) == 0,
    "gpipe": lambda count, ranks: True,
}


@pytest.mark.parametrize("schedule", RUNS)
def test_a_pipeline_gets_micro_batches_that_its_schedule_runs_or_batches_that_give_them(schedule):
    refused = 0
    for stages, ranks, most, batch in product((2, 4), (1, 3), (None, 1, 4, 7), range(1, 41)):
        pipeline = PipelineLayout(stages, schedule)
        share = batch / ranks
        sizes = [n for n in range(1, min(most or batch, batch) + 1) if share % n == 0 and RUNS[schedule](share // n, stages)]
        assert micro_batch(batch, most, ranks, pipeline) == max(sizes, default=0), (stages, ranks, most, batch)
        said = batch_problem(batch, most, ranks, pipeline)
        assert (said is None) == bool(sizes)
        if said is not None:
            use = [int(n) for n in re.search(r"use ([\d or]+) \(--data.global_batch_size\)", said)[1].split(" or ")]
            assert all(micro_batch(n, most, ranks, pipeline) for n in use) and use[-1] > batch, said
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("layout", "length", "size", "said"),
    [
        ((4, 2), None, 31, "global_batch_size 31 is not a multiple of 2 data-parallel ranks: use 30 or 32 (--data."),
        ((8, 8), None, 5, "global_batch_size 5 is not a multiple of 8 data-parallel ranks: use 8 (--data.global_batch_size)."),
        ((2, 1), 16, 40, "16 tokens per sequence x 1 data-parallel rank = 16: use 32 or 48 tokens (--batch_ramp."),
        ((2, 2), 16, 48, "16 tokens per sequence x 2 data-parallel ranks = 32: use 32 or 64 tokens (--batch_ramp."),
        ((2, 1, PipelineLayout(4)), None, 3, "needs at least 4 micro-batches in a step, but it has 3 (--trainer.strategy."),
        ((2, 1, PipelineLayout(4)), 16, 48, "batch_ramp: 48 tokens per batch: pipeline=4 with schedule 1f1b needs at least 4"),
    ],
)
def test_a_batch_that_the_ranks_cannot_share_names_sizes_that_they_can(layout, length, size, said):
    assert said in batch_problem(size, *layout, length=length)


def test_a_note_says_that_less_than_half_of_a_micro_batch_is_left():
    assert small_note(8, 8, 1) == small_note(8, 8, 2) == small_note(8, None, 8) == []
    (note,) = small_note(74, 16, 2)  # 37 is prime
    assert note.startswith("micro-batches of 1, not data.micro_batch_size 16: ") and "37 sequences" in note
