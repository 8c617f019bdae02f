"""Repeated spans and the overlap of training and validation, against sets of tuples of ids."""

import random

import pytest
import torch

from lit_llm.callbacks.health_readings import Readings
from lit_llm.callbacks.health_spans import RepeatedText, ValidationOverlap, span_hashes


def ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def spans(batch: torch.Tensor, length: int) -> list[tuple[int, ...]]:
    return [tuple(row[at : at + length]) for row in batch.tolist() for at in range(len(row) - length + 1)]


def read(part) -> dict[str, float]:
    readings = Readings(torch.device("cpu"))
    part.add_to(readings)
    return readings.read()


def test_equal_spans_have_equal_hashes_at_any_position_and_others_do_not():
    text = ids(1, 300, 0)
    batch = torch.cat([text[:, :200], text[:, 37:237]])
    hashes, exact = span_hashes(batch, 32).flatten().tolist(), spans(batch, 32)
    assert len({*zip(hashes, exact, strict=True)}) == len(set(hashes)) == len(set(exact)) < len(exact)


def test_a_copy_counts_as_repeated_wherever_it_begins():
    text = ids(1, 4000, 1).flatten()
    first = text[: 64 * 30].view(30, 64)
    again = text[11 : 11 + 64 * 30].view(30, 64)  # the same text in other sequences
    known = set(spans(first, 32))
    repeated = RepeatedText()
    repeated.add(first)
    assert read(repeated)["health/repeated_spans"] < 0.01
    repeated.add(again)
    expected = sum(span in known for span in spans(again, 32)) / len(spans(again, 32))
    assert read(repeated)["health/repeated_spans"] == pytest.approx(expected, abs=0.15)  # of a sixteenth of the spans
    repeated.add(ids(30, 64, 2))
    assert read(repeated)["health/repeated_spans"] == 0


def test_the_overlap_is_the_share_of_validation_spans_in_training():
    validation, draw = ids(60, 64, 3), random.Random(0)
    overlap = ValidationOverlap()
    overlap.add(ids(4, 64, 4))
    assert read(overlap) == {}  # nothing is known before a validation
    overlap.remember(validation[:10])
    overlap.remember(validation[10:])
    overlap.compare_from_now(torch.device("cpu"))
    overlap.remember(ids(20, 64, 5))  # a later validation adds nothing
    whole = validation.flatten()
    known = {tuple(row[at : at + 32].tolist()) for row in validation for at in (0, 32)}
    found = set()
    for _ in range(5):
        at = draw.randrange(len(whole) - 128)
        batch = whole[at : at + 128].view(2, 64)
        overlap.add(batch)
        found |= known & set(spans(batch, 32))
    assert 0 < len(found) < len(known) == 120
    assert read(overlap)["health/validation_overlap"] == pytest.approx(len(found) / len(known))


def test_spans_of_a_template_are_not_an_overlap():
    template, overlap = ids(1, 32, 6).repeat(100, 1), ValidationOverlap()
    overlap.remember(torch.cat([template, ids(100, 32, 7)], dim=1))
    overlap.compare_from_now(torch.device("cpu"))
    overlap.add(torch.cat([template, ids(100, 32, 8)], dim=1))
    assert read(overlap) == {"health/validation_overlap": 0}


@pytest.mark.parametrize(("rows", "share"), [(19, {}), (20, {"health/validation_overlap": 1})])
def test_a_share_of_few_spans_is_none(rows, share):
    overlap, validation = ValidationOverlap(), ids(rows, 64, 9)  # two spans a row
    overlap.remember(validation)
    overlap.compare_from_now(torch.device("cpu"))
    overlap.add(validation)
    assert read(overlap) == share
