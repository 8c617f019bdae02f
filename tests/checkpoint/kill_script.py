"""Processes that are killed while they save; started by test_kills.py. One interpreter imports torch, then forks each victim.

python kill_script.py random sync|async KILLS SEED FOLDER
python kill_script.py each FOLDER

Prints one line of JSON with what was found after each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO

KEEP = 2
# Every one of these changes, or makes durable, something on disk; Python tells of them before they are done.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "shutil.rmtree"}


def checkpoint(step: int) -> dict:
    return {"global_step": step, "state_dict": {f"w{i}": torch.full((64, 64), step * 10.0 + i) for i in range(8)}}


def step_of(path: Path | None) -> int | None:
    """The step of a checkpoint all of whose tensors belong to it."""
    if path is None:
        return None
    content = disk_format.read(path)
    step = content["global_step"]
    assert disk_format.read_manifest(path)["step"] == step
    assert all(torch.equal(w, checkpoint(step)["state_dict"][name]) for name, w in content["state_dict"].items())
    return step


def save_for_ever(io: FolderCheckpointIO, folder: Path, confirmed: int) -> None:
    """What StepCheckpoint does: save, wait until it is known to be good, tell, delete an older one; some steps twice."""
    step = step_of(disk_format.newest_good(folder)[0]) or 0
    weights = checkpoint(0)["state_dict"]
    while True:
        step += 1
        for _ in range(1 + (step % 3 == 0)):
            for i, weight in enumerate(weights.values()):
                weight.fill_(step * 10.0 + i)
            path = folder / f"step-{step:08d}.ckpt"
            io.save_checkpoint({"global_step": step, "state_dict": weights}, path)
            for weight in weights.values():  # training goes on while the thread writes
                weight.fill_(-1)
            assert io.finished(path, wait=True)
            os.write(confirmed, step.to_bytes(8, "little"))
        if step > KEEP:
            io.remove_checkpoint(folder / f"step-{step - KEEP:08d}.ckpt")


def kill_at_random(kind: str, kills: int, seed: int, folder: Path) -> dict:
    rng, lost, damaged, steps = random.Random(seed), [], [], []
    for _ in range(kills):
        read_end, write_end = os.pipe()
        victim = os.fork()
        if victim == 0:
            os.close(read_end)
            save_for_ever(AsyncFolderCheckpointIO() if kind == "async" else FolderCheckpointIO(), folder, write_end)
            os._exit(1)
        os.close(write_end)
        os.read(read_end, 8)  # the first one is saved
        time.sleep(rng.uniform(0, 0.06))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        promised = [
            int.from_bytes(rest[i : i + 8], "little") for rest in [os.read(read_end, 1 << 16)] for i in range(0, len(rest), 8)
        ]
        os.close(read_end)
        best, problems = disk_format.newest_good(folder)
        found = step_of(best) or 0
        steps.append(found)
        damaged += problems
        if promised and found < promised[-1]:
            lost.append([promised[-1], found])
    return {"lost": lost, "damaged": damaged, "steps": steps, "left": sorted(os.listdir(folder))}


def kill_at_each(what: str, folder: Path) -> dict:
    """A kill before the 1st, 2nd, … operation on the disk, until the work gets done. Then a save by a process that lives."""
    found, after = [], []
    for n in range(1000):
        place = folder / str(n)
        disk_format.write(checkpoint(1), place / "step-00000001.ckpt")
        victim = os.fork()
        if victim == 0:
            count = -n

            def hook(event: str, args: tuple) -> None:
                nonlocal count
                if event in OPERATIONS:
                    count += 1
                    if count > 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            if what == "remove":
                disk_format.remove(place / "step-00000001.ckpt")
            else:
                disk_format.write(checkpoint(2), place / ("step-00000002.ckpt" if what == "new" else "step-00000001.ckpt"))
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        best, problems = disk_format.newest_good(place)
        assert not problems, problems
        found.append(step_of(best))
        disk_format.write(checkpoint(3), place / "step-00000003.ckpt")
        hidden = [name for name in os.listdir(place) if name.startswith(".")]
        after.append([step_of(disk_format.newest_good(place)[0]), hidden])
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"found": found, "after": after}
    raise AssertionError("it never got done")


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "random":
        print(json.dumps(kill_at_random(rest[0], int(rest[1]), int(rest[2]), Path(rest[3]))))
    else:
        print(json.dumps({what: kill_at_each(what, Path(rest[0]) / what) for what in ("new", "again", "remove")}))
