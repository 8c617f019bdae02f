"""The rank of this process, from the environment variables of its launcher, by the rules of Lightning. Imports no torch.

torchrun sets RANK, which takes precedence in a Slurm job. srun sets SLURM_PROCID, but in a job with a shell's name (salloc)
each process is a run of its own. Processes that Lightning starts have LOCAL_RANK and NODE_RANK.
"""

from __future__ import annotations

import os

_NUMBERS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PL_GLOBAL_SEED"),
)


def wrong_numbers() -> list[str]:
    """A sentence for each variable of torchrun, Slurm or Lightning whose value is not a number in its range."""
    rules = {name: "a whole number" for name in _NUMBERS if not os.environ.get(name, "0").isdecimal()}
    if _number("MASTER_PORT") >= 2**16:
        rules["MASTER_PORT"] = "at most 65535"
    said = "the environment variable {} is '{}', but must be {}: unset it"
    return [said.format(name, os.environ[name], rule) for name, rule in rules.items()]


def is_torchrun() -> bool:
    """Whether torchrun has launched this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_slurm() -> bool:
    """Whether srun has launched this process as a rank of a run."""
    named_as_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in os.environ and not named_as_shell and not is_torchrun()


def launched_ranks() -> int | None:
    """Number of processes of a run that torchrun, srun or Lightning has started. None: Lightning will start them."""
    ranks = os.environ.get("WORLD_SIZE") or (os.environ["SLURM_NTASKS"] if is_slurm() else None)
    return None if ranks is None else int(ranks)


def may_have_peers() -> bool:
    """Whether other ranks of the run may already be running: a launcher has started them, or Lightning on another node."""
    return (launched_ranks() or 1) > 1 or "NODE_RANK" in os.environ


def is_rank_zero() -> bool:
    """Whether this process is global rank 0; known before a process group exists."""
    return _rank() == (0, 0)


def rank_name() -> str:
    """The name of this process in messages: "rank 3", or "rank 3 of node 1" if Lightning starts processes on several nodes."""
    rank, node = _rank()
    return f"rank {rank} of node {node}" if node else f"rank {rank}"


def _rank() -> tuple[int, int]:
    """(global rank, 0) under torchrun or srun; else (rank on the node, number of the node), which Lightning sets; default 0."""
    if "RANK" in os.environ:
        return _number("RANK"), 0
    if is_slurm():
        return _number("SLURM_PROCID"), 0
    return _number("LOCAL_RANK", "JSM_NAMESPACE_RANK"), _number("NODE_RANK", "GROUP_RANK")


def is_first_here() -> bool:
    """Whether this process is the first process (local rank 0) of a run on its machine."""
    return _number("LOCAL_RANK", *(("SLURM_LOCALID",) if is_slurm() else ())) == 0


def has_agent_store() -> bool:
    """Whether torchrun's agent, and not rank 0, hosts the TCPStore through which the processes find each other."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restarts() -> int:
    """Number of times that torchrun has restarted the ranks. A restart does not empty the TCPStore of torchrun's agent."""
    return _number("TORCHELASTIC_RESTART_COUNT")


def _number(*names: str) -> int:
    """The whole number in the first of these environment variables that has one; 0 if no variable has."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), 0)
