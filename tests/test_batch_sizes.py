"""Accumulation follows from the batch sizes; a batch that does not divide is refused with sizes that do."""

import pytest

from lit_llm.batch_sizes import accumulation_steps
from lit_llm.errors import UserError


@pytest.mark.parametrize(
    ("global_batch", "micro", "world", "expected"), [(32, 8, 1, 4), (32, 8, 4, 1), (512, 4, 8, 16), (30, None, 3, 1)]
)
def test_accumulation_follows_from_the_sizes(global_batch, micro, world, expected):
    assert accumulation_steps(global_batch, micro, world) == expected


@pytest.mark.parametrize(
    ("global_batch", "micro", "world", "use"),
    [
        (30, 4, 2, "use 24 or 32 (--data.global_batch_size), or lower --data.micro_batch_size to 3."),
        (5, 8, 1, "use 8 (--data.global_batch_size), or lower --data.micro_batch_size to 5."),
        (7, 2, 1, "use 6 or 8 (--data.global_batch_size), or lower --data.micro_batch_size to 1."),
        (100, 12, 1, "use 96 or 108 (--data.global_batch_size), or lower --data.micro_batch_size to 10."),
        # No micro-batch helps where the ranks cannot share the batch equally.
        (31, None, 2, "use 30 or 32 (--data.global_batch_size)."),
        (31, 2, 2, "use 28 or 32 (--data.global_batch_size)."),
    ],
)
def test_a_batch_that_does_not_divide_names_sizes_that_do(global_batch, micro, world, use):
    with pytest.raises(UserError) as refused:
        accumulation_steps(global_batch, micro, world)
    assert str(refused.value).startswith(f"global_batch_size {global_batch} is not a multiple of ")
    assert str(refused.value).endswith(f": {use}")
