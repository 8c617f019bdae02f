"""The same checks on GPUs, where there are some: nothing here runs on a machine without one."""

import pytest

from lit_llm.certify.check import run_checks
from lit_llm.certify.promises import groups

CASES = [pytest.param(1, marks=pytest.mark.cuda, id="one"), pytest.param(2, marks=pytest.mark.nccl, id="two")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", CASES)
def test_no_check_fails_on_gpus(devices, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the checks' processes are forks of this one
    found, ended = run_checks(groups(devices, "cuda", place=str(tmp_path)), (), "cuda", 3000)
    assert ended is None
    assert [f"{each.name}: {each.figure} {each.reason}" for each in found if each.outcome == "failed"] == []
