"""Several ranks resume: they hash every file of the checkpoint once in all, and load what rank 0 has chosen."""

import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from ports import free_port
from recipe_runs import curve, run

ROOT = Path(__file__).parents[2]
COUNTED = str(Path(__file__).with_name("counted_fit.py"))
LOADS = """
import sys
import torch.distributed as dist
from lit_llm.checkpoint.io import FolderCheckpointIO
from lit_llm.core.errors import UserError

dist.init_process_group("gloo")
mine = sys.argv[1 + dist.get_rank()]
try:
    print("loaded step", FolderCheckpointIO().load_checkpoint(mine)["global_step"])
except UserError as error:
    print("refused:", error)
dist.destroy_process_group()
"""


def start_ranks(folder: Path, *command: str, by_lightning: bool = False, code: int = 0) -> list[str]:
    """The output of each process of two ranks; fails if one of them ends with another exit code."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    port = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{}] if by_lightning else [{**port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [
        fork_server.Popen(
            [sys.executable, *command], cwd=folder, env=env | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for more in ranks
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(said)
    return said


def hashed(folder: Path, rank: int) -> list[tuple[int, str]]:
    """(bytes, path) of what a rank has hashed since the last call."""
    file = folder / f"hashed-{rank}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [(int(size), path) for size, path in (line.split(" ", 1) for line in lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "by_lightning",
    [pytest.param(False, id="as torchrun"), pytest.param(True, id="started by Lightning")],
)
def test_a_whole_checkpoint_is_hashed_once_on_rank_0_and_never_on_rank_1(folder, capsys, by_lightning):
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")
    checkpoint = (folder / "runs/tiny/checkpoints/step-00000002.ckpt/checkpoint.pt").resolve()
    size = checkpoint.stat().st_size
    flags = ["--config", "tiny.yaml", "--resume", "auto", "--trainer.devices", "2", "--trainer.max_steps", "3"]
    start_ranks(folder, COUNTED, "fit", *flags, by_lightning=by_lightning)
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == [1, 2, 3]
    assert hashed(folder, 0) == [(size, str(checkpoint))]
    assert hashed(folder, 1) == []


@pytest.mark.slow
def test_each_rank_hashes_its_own_shard_and_a_damaged_one_is_passed_by_at_the_next_start(folder, capsys):
    fsdp2 = ["--config", "tiny.yaml", "--config", str(ROOT / "recipes/strategy/fsdp2.yaml"), "--trainer.devices", "2"]
    flags = [COUNTED, "fit", *fsdp2, "--sharded_checkpoints", "true", "--checkpoint.every_n_steps", "1", "--resume", "auto"]
    start_ranks(folder, *flags, "--trainer.max_steps", "2")
    assert hashed(folder, 0) == hashed(folder, 1) == []
    first, second = "shard-00000-of-00002.pt", "shard-00001-of-00002.pt"
    step_1, step_2 = (folder.resolve() / f"runs/tiny/checkpoints/step-0000000{step}.ckpt" for step in (1, 2))
    sizes = {file: file.stat().st_size for step in (step_1, step_2) for file in step.iterdir()}

    def read(checkpoint: Path, *names: str) -> list[tuple[int, str]]:
        return [(sizes[checkpoint / name], str(checkpoint / name)) for name in names]

    start_ranks(folder, COUNTED, "fit", *fsdp2, "--init_from", "runs/tiny", "--run_dir", "runs/new", "--trainer.max_steps", "2")
    assert hashed(folder, 0) == read(step_2, "checkpoint.pt", first) and hashed(folder, 1) == read(step_2, second)
    with open(step_2 / second, "r+b") as file:
        file.seek(1500)
        file.write(b"\x55\x55")
    said = start_ranks(folder, *flags, "--trainer.max_steps", "3", code=2)
    damage = f"checkpoint {step_2.relative_to(folder.resolve())} is damaged: the contents of {second} have changed"
    assert f"error: {damage} since it was written. --resume auto takes" in said[0] and damage not in said[1]  # reported once
    assert hashed(folder, 0) == read(step_2, "checkpoint.pt", first) and hashed(folder, 1) == read(step_2, second)
    said = start_ranks(folder, *flags, "--trainer.max_steps", "3")
    assert f"warning: {damage}" in said[0] and "resume: from step 1" in said[0]
    assert sorted(curve(Path("runs/tiny"), "train/loss")) == [1, 2, 3]
    assert hashed(folder, 0) == read(step_1, "checkpoint.pt", first) and hashed(folder, 1) == read(step_1, second)


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
