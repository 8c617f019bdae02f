"""Every optimizer on one layout: trained, saved, killed and resumed. One process start per layout.

    python optimizer_matrix.py LAYOUT '{NAME: [WAY, …], …}'     one process per rank (launch.run_ranks)

A first process of each rank trains every optimizer without interruption, saving in the middle in its ways, and is ended by
SIGKILL. A second one continues each save. Reported for each optimizer and way is "exact" if the continuation's losses, weights
and last checkpoint equal those of the uninterrupted run, else what happened.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import launch
import layouts
import torch
from lightning.pytorch import Callback

from lit_llm.checkpoint.disk_format import read

LAYOUTS: dict[str, tuple[int, Any]] = {
    "single": (1, "auto"),
    "ddp": (2, "ddp"),
    "fsdp2": (2, {"shard": 2}),
    "tp": (2, {"shard": 1, "tensor_parallel": 2}),
    "pp": (2, {"shard": 1, "pipeline": 2}),
    "hsdp": (4, {"replicate": 2, "shard": 2}),
    "fsdp2-tp": (4, {"shard": 2, "tensor_parallel": 2}),
}
"""Name → number of processes, and the strategy as `layouts.train` takes it."""

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "MuonAdamW": ("lit_llm.optim.MuonAdamW", {}),
    "MuonAdamW, NorMuon": ("lit_llm.optim.MuonAdamW", {"normuon_beta2": 0.95, "ns_method": "polar_express"}),
    "Lion": ("lit_llm.optim.Lion", {"lr": 1e-3}),
    "AdamW": ("torch.optim.AdamW", {"lr": 1e-2}),
    "AdamW, fused": ("torch.optim.AdamW", {"lr": 1e-2, "fused": True}),
    "AdamW, foreach": ("torch.optim.AdamW", {"lr": 1e-2, "foreach": True}),
    "AdamW, amsgrad": ("torch.optim.AdamW", {"lr": 1e-2, "amsgrad": True}),
    "Adam": ("torch.optim.Adam", {"lr": 1e-2}),
    "Adamax": ("torch.optim.Adamax", {"lr": 1e-2}),
    "NAdam": ("torch.optim.NAdam", {"lr": 1e-2}),
    "RAdam": ("torch.optim.RAdam", {"lr": 1e-2}),
    "SGD": ("torch.optim.SGD", {"lr": 0.1}),
    "SGD, momentum": ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": ("torch.optim.RMSprop", {"lr": 1e-3, "momentum": 0.9}),
    "Adagrad": ("torch.optim.Adagrad", {"lr": 1e-2}),
    "Adadelta": ("torch.optim.Adadelta", {}),
    "ASGD": ("torch.optim.ASGD", {"lr": 1e-2, "t0": 0.0}),
    "Rprop": ("torch.optim.Rprop", {"lr": 1e-3}),
    "Adafactor": ("torch.optim.Adafactor", {"lr": 1e-2}),
    "torch.optim.Muon": ("lit_llm.optim.TorchMuon", {"lr": 1e-2}),
    "LBFGS": ("torch.optim.LBFGS", {}),
    "SparseAdam": ("torch.optim.SparseAdam", {}),
    "torchao AdamW8bit": ("torchao.optim.AdamW8bit", {"lr": 1e-2}),
    "torchao AdamW4bit": ("torchao.optim.AdamW4bit", {"lr": 1e-2}),
    "torchao AdamWFp8": ("torchao.optim.AdamWFp8", {"lr": 1e-2}),
}
"""Name in docs/evidence/support-matrix.md → class path, as `fit` uses it, and init_args."""

STEPS, SAVE = 2, 1
WIDTH = 64  # so that a rank's part of a matrix has the 4,096 values from which torchao compresses
MICRO_BATCH = {"single": 8, "tp": 8, "hsdp": 2}
"""Rows; 4 on other layouts. Few micro-batches a step: what is tested is the optimizer."""
SECONDS = 600
"""Time limit of one of the two processes."""


class SaveWhole(Callback):
    """A second save at step `SAVE`, of whole tensors, in a run that saves shards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVE and not self.saved:  # its next micro-batches end at the same step
            self.saved = True
            trainer.strategy.sharded_checkpoints = False
            trainer.save_checkpoint(self.folder / SAVED)
            trainer.strategy.sharded_checkpoints = True


SAVED, LAST = (f"step-{step:08d}.ckpt" for step in (SAVE, STEPS))


def train(layout: str, optimizer: str, **job: Any) -> dict[str, Any]:
    ranks, strategy = LAYOUTS[layout]
    class_path, init_args = OPTIMIZERS[optimizer]
    layouts.OPTIMIZERS[optimizer] = lambda groups: layouts.instantiate(class_path, groups, init_args)
    settings = {"n_embd": WIDTH, "n_layer": 2 if layout == "pp" else 1}
    return layouts.train(
        Path.cwd(),
        ranks=ranks,
        strategy=strategy,
        optimizer=optimizer,
        micro_batch_size=MICRO_BATCH.get(layout, 4),
        steps=STEPS,
        save_at=SAVE,
        settings=settings,
        parameters=True,
        validate=False,
        **job,
    )


def said(error: BaseException) -> str:
    traceback.print_exc()
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"


def in_a_fork(work: Callable[[], Any], number: int) -> tuple[int, Any]:
    """(exit code, negative for a signal; result) of `work` in a child process."""
    out = Path(f"fork-{number}-{os.environ['RANK']}.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    port = agreed_port(number)
    child = os.fork()
    if child == 0:
        os.environ["MASTER_PORT"] = str(port)
        faulthandler.dump_traceback_later(SECONDS)  # into the log of the rank, before a run that hangs is killed
        code = 1
        try:
            torch.save(work(), out)
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + SECONDS + 20
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status), torch.load(out, weights_only=True) if out.exists() else None


def different(a: Any, b: Any) -> int:
    """Number of leaves of two nested structures that are not equal bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return sum(different(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return abs(len(a) - len(b)) + sum(map(different, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return 1
        if type(a) is not torch.Tensor and hasattr(a, "__tensor_flatten__"):
            names = a.__tensor_flatten__()[0]
            return sum(different(getattr(a, name), getattr(b, name)) for name in names)
        return int(not torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b))
    return int(a != b)


def train_all(layout: str, ways_of: dict[str, list[str]]) -> dict[str, Any]:
    """{optimizer: its uninterrupted run, or what happened}."""
    runs: dict[str, Any] = {}
    for number, (name, ways) in enumerate(ways_of.items()):
        sharded = "sharded" in ways
        more = [SaveWhole(Path(f"{number}-whole"))] if sharded and "whole" in ways else []
        try:
            runs[name] = train(layout, name, to=f"{number}-straight", sharded=sharded, more=more)
        except Exception as error:
            runs[name] = f"train: {said(error)}"
    return runs


def resume_all(layout: str, ways_of: dict[str, list[str]], straight: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{optimizer: {way: "exact" or what happened}}."""
    results: dict[str, dict[str, str]] = {name: {} for name in ways_of}
    for number, (name, ways) in enumerate(ways_of.items()):
        for way in ways:
            if isinstance(straight[name], str):
                results[name][way] = straight[name]
                continue
            saved = f"{number}-{'straight' if way == ways[-1] else way}/{SAVED}"
            try:
                resumed = train(layout, name, to=f"{number}-resumed-{way}", sharded=way == "sharded", resume=saved)
            except Exception as error:
                results[name][way] = f"resume: {said(error)}"
                continue
            differ = different(resumed["train/loss"], straight[name]["train/loss"][SAVE:])
            differ += different(resumed["parameters"], straight[name]["parameters"])
            kept = ("state_dict", "optimizer_states", "global_step")
            one, other = (read(Path(folder) / LAST) for folder in (f"{number}-resumed-{way}", f"{number}-straight"))
            differ += different({k: one[k] for k in kept}, {k: other[k] for k in kept})
            results[name][way] = "exact" if differ == 0 else f"{differ} values differ"
    return results


def agreed_port(number: int) -> int:
    """A free port for fork `number` of all ranks, chosen by rank 0 just before it is used."""
    file = Path(f"port-{number}")
    if os.environ["RANK"] == "0":
        partial = file.with_suffix(".partial")
        partial.write_text(str(launch.free_port()))
        partial.rename(file)
    while not file.exists():
        time.sleep(0.005)
    return int(file.read_text())


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    layout, ways_of = sys.argv[1], json.loads(sys.argv[2])
    code, straight = in_a_fork(partial(train_all, layout, ways_of), 0)
    assert code == -signal.SIGKILL and straight is not None, "no run ended"
    code, results = in_a_fork(partial(resume_all, layout, ways_of, straight), 1)
    assert code == 0, "a continuation ended the process"
    launch.report(**results)


if __name__ == "__main__":
    main()
