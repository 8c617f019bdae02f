"""Files of a run and its data that somebody replaced: a sentence or a result, no traceback, no hang, nothing else changed."""

import pytest
import replaced_files

ALL = list(replaced_files.triples())


@pytest.mark.slow
def test_a_sample_of_damages():
    assert not replaced_files.attack(ALL[:24])


@pytest.mark.soak
def test_every_damage_of_every_file_under_every_command():
    assert len({(triple.file, triple.damage) for triple in ALL}) > 500
    assert not replaced_files.attack(ALL)
