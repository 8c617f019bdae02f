"""The newest checkpoint of a real run, truncated or with one bit flipped, is reported. Only that checkpoint is lost."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import matrix
import pytest
from matrix import Cell
from run_comparison import differences

from lit_llm.runs.resume import find_start

pytestmark = pytest.mark.slow

TIMES = 20
LAYOUTS = {
    "one file": (Cell("1 single", 1, 0, 0.2, "32-true"), []),
    "shards": (Cell("2 fsdp2", 1, 0, 0.2, "32-true"), ["--sharded_checkpoints", "true"]),
}


@pytest.fixture(scope="module", params=["one file", "shards"])
def finished(request, launcher, folder):
    """(cell, flags, run folder) of a complete run."""
    cell, flags = LAYOUTS[request.param]
    name = f"damage-{cell.ranks}"
    run = launcher.run(matrix.fit(cell, name, *flags), folder, ranks=cell.ranks, log=f"{name}.log")
    assert set(run.codes) == {0}, run.said()
    return cell, flags, folder / name


def place(rng: random.Random, checkpoint: Path) -> tuple[Path, int]:
    """A file of the checkpoint and an offset in it."""
    file = rng.choice(sorted(checkpoint.iterdir()))
    return file, rng.randrange(file.stat().st_size)


@pytest.mark.parametrize("kind", ["truncated", "one bit flipped"])
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_used(finished, kind, capsys):
    run_dir = finished[-1]
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if not path.is_symlink())
    newest, before = run_dir / "checkpoints" / kept[-1], run_dir / "checkpoints" / kept[-2]
    assert find_start(run_dir, "auto", replace=False)[0].path == newest
    rng = random.Random(kind)
    for _ in range(TIMES):
        file, byte = place(rng, newest)
        good = file.read_bytes()
        bad = bytearray(good)
        if kind == "truncated":
            del bad[byte:]
        else:
            bad[byte] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        assert find_start(run_dir, "auto", replace=False)[0].path == before
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and re.match(f"warning: checkpoint {newest} is damaged: .*{file.name}", said), said
        file.write_bytes(good)
    assert find_start(run_dir, "auto", replace=False)[0].path == newest


def test_a_run_continued_from_the_previous_checkpoint_is_the_same(finished, launcher, folder):
    cell, flags, run_dir = finished
    again = folder / f"{run_dir.name}-again"
    shutil.copytree(run_dir, again, symlinks=True)
    file, byte = place(random.Random(1), (again / "checkpoints" / "last.ckpt").resolve())
    with open(file, "r+b") as opened:
        opened.truncate(byte)
    run = launcher.run(matrix.fit(cell, again.name, *flags), folder, ranks=cell.ranks, log=f"{again.name}.log")
    assert set(run.codes) == {0} and "is damaged" in run.said() and "resume: from step" in run.said()
    assert differences(run_dir, again)[1] == []
