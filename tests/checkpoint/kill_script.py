"""Processes that are killed while they save; started by test_kills.py. One interpreter imports torch, then forks each victim.

python kill_script.py FOLDER

Prints one line of JSON with what was found after each kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from lit_llm.checkpoint import disk_format

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
    print(json.dumps({what: kill_at_each(what, Path(sys.argv[1]) / what) for what in ("new", "again", "remove")}))
