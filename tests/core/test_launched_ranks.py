"""Which process this one is, by the variables of its launcher; Lightning's environments decide in the same way."""

import os

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from lit_llm.core import ranks
from lit_llm.training import bounded_exit

SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_NAME": "train"}
SHELL = {**SRUN, "SLURM_JOB_NAME": "interactive"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "zero", "first_here", "launched", "name"),
    [
        ({}, True, True, None, "rank 0"),
        (SRUN, False, False, 4, "rank 3"),
        ({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, False, True, 4, "rank 2"),
        (SHELL, True, True, None, "rank 0"),
        ({**SHELL, "SLURM_JOB_NAME": "bash"}, True, True, None, "rank 0"),
        ({**SHELL, "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, False, False, 2, "rank 1"),  # Lightning's child
        (TORCHRUN, False, True, 4, "rank 2"),
        ({**SRUN, **TORCHRUN, "RANK": "0", "SLURM_NTASKS": "1"}, True, True, 4, "rank 0"),  # torchrun within a job
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False, True, None, "rank 0 of node 1"),
    ],
)
def test_the_process_follows_from_the_launcher(monkeypatch, variables, zero, first_here, launched, name):
    for each in os.environ:
        if each.startswith(("SLURM_", "TORCHELASTIC_")) or each in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(each)
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    assert (ranks.is_rank_zero(), ranks.is_first_here(), ranks.launched_ranks(), ranks.rank_name()) == (
        zero, first_here, launched, name
    )  # fmt: skip
    assert ranks.is_torchrun() == TorchElasticEnvironment.detect()
    assert ranks.is_slurm() == (SLURMEnvironment.detect() and not TorchElasticEnvironment.detect())


@pytest.mark.parametrize(("port", "rule"), [("x", "a whole number"), ("70000", "at most 65535")])
def test_a_port_that_is_none_is_named_and_a_further_rank_ends_without_a_traceback(monkeypatch, port, rule):
    monkeypatch.setenv("MASTER_PORT", port)
    assert [rule in sentence and "MASTER_PORT" in sentence for sentence in ranks.wrong_numbers()] == [True]
    bounded_exit._let_the_first_rank_end()
