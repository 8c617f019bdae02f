"""A temporarily full disk: the run warns and continues, and keeps all earlier checkpoints."""

from __future__ import annotations

import matrix
import pytest
from matrix import Cell
from run_comparison import differences
from victims import overlay

from lit_llm.checkpoint.disk_format import damage

SHARDS = ["--sharded_checkpoints", "true"]
CASES = [
    pytest.param(Cell("1 single", 1, 0, 0.2, "32-true"), 0, [], id="one file", marks=pytest.mark.slow),
    pytest.param(Cell("2 fsdp2", 1, 0, 0.2, "32-true"), 1, SHARDS, id="the other rank's shard", marks=pytest.mark.slow),
    pytest.param(
        Cell("2 fsdp2", 1, 0, 0.2, "32-true"), 1, [*SHARDS, "--async_checkpoints", "true"], id="in the background",
        marks=pytest.mark.soak,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "rank", "flags"), CASES)
def test_a_save_to_a_full_disk_is_reported_and_the_run_continues_with_older_checkpoints(launcher, folder, cell, rank, flags):
    names = {"straight": [], "full": overlay(folder, "full.yaml", ("FullDisk", {"rank": rank, "steps": [6, 8]}))}
    for name, more in names.items():
        run_dir = f"{name}-{len(flags)}"
        run = launcher.run(matrix.fit(cell, run_dir, *flags, *more), folder, ranks=cell.ranks, log=f"{run_dir}.log")
        assert set(run.codes) == {0}, run.said()
    assert [step for step in (6, 8) if f"step-{step:08d}.ckpt could not be saved" in run.said()] == [6, 8]
    assert run.said().count("could not be saved: ") == 2 and "No space left on device" in run.said()
    rows, found = differences(folder / f"straight-{len(flags)}", folder / run_dir)
    assert found == [] and rows
    kept = [path for path in (folder / run_dir / "checkpoints").iterdir() if not path.is_symlink()]
    assert kept and all(damage(path) is None for path in kept)
