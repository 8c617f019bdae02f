"""What is judged of a Trainer's settings before there is a Trainer."""

import pytest

from lit_llm.config.preflight import devices_problem


@pytest.mark.parametrize("devices", ["auto", None, 1, "2", -1, "-1", [0], [0, 1], "0,1", "3,"])
def test_devices_that_name_some(devices):
    assert devices_problem(devices) is None


@pytest.mark.parametrize("devices", [0, "0", -2, [], "", [-1], "0,-1", "1,1", [2, 2], "gpu", "1.5", [0, "x"]])
def test_devices_that_name_none_or_one_twice(devices):
    said = devices_problem(devices)
    assert said is not None and str(devices) in said and "(--trainer.devices " in said
