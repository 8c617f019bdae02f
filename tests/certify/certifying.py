"""Runs checks of `certify`. Their processes are forks of the test's, so a fault that it plants is in them."""

import os

from lit_llm.certify.check import Outcome, run_checks
from lit_llm.certify.promises import groups


def outcome(name: str, devices: int = 1, device: str = "cpu") -> Outcome:
    found, ended = run_checks(groups(devices, device, place=os.getcwd()), (name,), device, 200)
    assert ended is None, ended
    return found[0]
