"""Several ranks resume: rank 0 reads the checkpoint once to verify it, and all of them load what rank 0 has chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from recipe_runs import curve, run

ROOT = Path(__file__).parents[2]
LOADS = """
import sys
import torch.distributed as dist
from lit_llm.checkpoint.io import FolderCheckpointIO
from lit_llm.errors import UserError

dist.init_process_group("gloo")
mine = sys.argv[1 + dist.get_rank()]
try:
    print("loaded step", FolderCheckpointIO().load_checkpoint(mine)["global_step"])
except UserError as error:
    print("refused:", error)
dist.destroy_process_group()
"""


def start_ranks(folder: Path, *command: str, by_lightning: bool = False) -> list[str]:
    """The output of each process of two ranks; fails if one of them does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    port = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{}] if by_lightning else [{**port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=env | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for more in ranks
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def hashed(folder: Path, rank: int) -> list[tuple[int, str]]:
    file = folder / f"hashed-{rank}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(size), path) for size, path in (line.split(" ", 1) for line in lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "by_lightning",
    [pytest.param(False, id="as torchrun"), pytest.param(True, id="started by Lightning")],
)
def test_a_resume_hashes_the_checkpoint_once_on_rank_0_and_never_on_rank_1(folder, capsys, by_lightning):
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")
    checkpoint = (folder / "runs/tiny/checkpoints/step-00000002.ckpt/checkpoint.pt").resolve()
    size = checkpoint.stat().st_size
    flags = ["--config", "tiny.yaml", "--resume", "auto", "--trainer.devices", "2", "--trainer.max_steps", "3"]
    script = str(Path(__file__).with_name("counted_fit.py"))
    start_ranks(folder, script, "fit", *flags, by_lightning=by_lightning)
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == [1, 2, 3]
    assert hashed(folder, 0) == [(size, str(checkpoint))]
    assert hashed(folder, 1) == []


@pytest.mark.slow
def test_all_ranks_load_the_checkpoint_of_rank_0_even_if_a_link_has_changed_in_between(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--checkpoint.every_n_steps", "1", "--trainer.max_steps", "2")
    steps = [str(folder / f"runs/tiny/checkpoints/step-0000000{step}.ckpt") for step in (1, 2)]
    (folder / "loads.py").write_text(LOADS)
    assert [said.strip() for said in start_ranks(folder, "loads.py", *steps)] == ["loaded step 1"] * 2
    with open(Path(steps[0]) / "checkpoint.pt", "r+b") as file:
        file.seek(1500)
        file.write(b"\x55\x55")
    for said in start_ranks(folder, "loads.py", *steps):  # also the rank whose own path is good
        assert said.startswith("refused: ") and "step-00000001.ckpt is damaged" in said
