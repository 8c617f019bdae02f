"""docs/fit.sbatch with fake srun and scontrol: what it starts, and that it requeues only after a signal."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "fit.sbatch"


@pytest.mark.parametrize(("ends_with", "requeued"), [(0, False), (75, True), (2, False), (1, False)])
def test_it_requeues_only_after_a_signal(tmp_path, ends_with, requeued):
    for name, body in (("srun", f'echo "srun $*"; exit {ends_with}'), ("scontrol", 'echo "scontrol $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "417"}
    done = subprocess.run(
        ["bash", SCRIPT, "recipes/x.yaml", "--config", "an overlay.yaml"],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ends_with
    started = "srun --kill-on-bad-exit=1 python -m lit_llm fit --config recipes/x.yaml --resume auto --config an overlay.yaml"
    expected = [f"{started} --trainer.num_nodes 2 --trainer.devices 8"] + (["scontrol requeue 417"] if requeued else [])
    assert done.stdout.splitlines() == expected


def test_without_a_recipe_it_prints_its_usage():
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True)
    assert done.returncode != 0 and "usage: sbatch docs/fit.sbatch RECIPE" in done.stderr
