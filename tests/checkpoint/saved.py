"""Small checkpoints, and how tests look at and damage their files."""

from collections import OrderedDict

import torch

from lit_llm.checkpoint import disk_format


def checkpoint(step, **more):
    weight = torch.full((50, 40), float(step))
    return {"global_step": step, "state_dict": OrderedDict(a=weight, b=weight.detach()), **more}


def step_path(folder, step):
    return folder / f"step-{step:08d}.ckpt"


def save(folder, *steps):
    for step in steps:
        disk_format.write(checkpoint(step), step_path(folder, step))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
