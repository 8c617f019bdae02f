"""Files of runs, data and models that somebody replaced: a sentence or a result, and nothing else changes."""

import pytest
import replaced_files


@pytest.fixture(scope="module")
def world():
    with replaced_files.a_world() as world:
        yield world


@pytest.mark.slow
def test_a_sample_of_damages(world):
    found, tried, _ = replaced_files.attack(world, replaced_files.triples(world.places, 1)[:12])
    assert not found and len(tried) > 3


@pytest.mark.soak
def test_every_damage_of_every_file(world):
    chosen = replaced_files.triples(world.places, 1)
    assert len(chosen) == len({(triple.file, triple.damage) for triple in chosen}) > 1200
    assert not replaced_files.attack(world, chosen)[0]
