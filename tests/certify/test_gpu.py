"""The same checks on GPUs, where there are some: nothing here runs on a machine without one."""

import pytest
import torch

from lit_llm.certify.check import run_checks
from lit_llm.certify.checks import groups

CASES = [
    pytest.param(1, marks=[pytest.mark.cuda, pytest.mark.slow], id="one"),
    pytest.param(2, marks=[pytest.mark.nccl, pytest.mark.slow], id="two"),
]


@pytest.mark.parametrize("devices", CASES)
def test_no_check_fails_on_gpus(devices, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the checks' processes are forks of this one
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    found, ended = run_checks(groups(devices, "cuda", place=str(tmp_path)), (), "cuda", 600)
    assert ended is None
    assert [f"{each.name}: {each.figure} {each.reason}" for each in found if each.outcome == "failed"] == []
