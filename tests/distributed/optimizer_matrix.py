"""Every optimizer on one layout: trained, saved, killed and resumed. One process start per layout.

    python optimizer_matrix.py LAYOUT 'NAME|NAME|…'     one process per rank (launch.run_ranks)

The processes import everything once and fork for each run, so a killed run costs no second import. For every optimizer:
an uninterrupted run; for each way of saving, a run that is ended by SIGKILL after its save; and its continuation. Reported is
"exact" if the continuation's losses, weights and last checkpoint equal the uninterrupted run's, else what happened.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import launch  # its folder's parent has `ports`
import layouts
import torch
from lightning.pytorch import Callback

from lit_llm.checkpoint.format import read

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
"""Name in docs/support-matrix.md → class path, as `fit` uses it, and init_args."""

STEPS, SAVE, KILL = 4, 2, 3
WIDTH = 64  # so that a rank's part of a matrix has the 4,096 values from which torchao compresses


class KillAt(Callback):
    """SIGKILL to this process when `KILL` steps are made."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == KILL:
            os.kill(os.getpid(), signal.SIGKILL)


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
        steps=STEPS,
        save_at=SAVE,
        settings=settings,
        parameters=True,
        **job,
    )


def in_a_fork(work: Callable[[], dict[str, Any]], number: int) -> tuple[int, dict[str, Any] | str]:
    """(exit code, negative for a signal; result, or the last line of the error) of `work` in a child process."""
    out = Path(f"fork-{os.environ['RANK']}.pt")
    out.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    port = agreed_port(number)
    child = os.fork()
    if child == 0:
        os.environ["MASTER_PORT"] = str(port)
        faulthandler.dump_traceback_later(100)  # into the log of the rank, before a run that hangs is killed
        code = 1
        try:
            torch.save(work(), out)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            torch.save({"error": f"{type(error).__name__}: {lines[0]}"}, out)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + 120
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    content = torch.load(out, weights_only=True) if out.exists() else {"error": "no report"}
    code = os.waitstatus_to_exitcode(status)
    return code, content if code == 0 else content["error"]


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


def cell(layout: str, optimizer: str, numbers: Iterator[int]) -> dict[str, str]:
    """{"whole": "exact" or what happened, "sharded": the same}; "sharded" only where a layout has shards."""
    ways = {"whole": False} | ({"sharded": True} if isinstance(LAYOUTS[layout][1], dict) else {})
    code, straight = in_a_fork(partial(train, layout, optimizer, to="straight"), next(numbers))
    if code != 0:
        return dict.fromkeys(ways, f"train: {straight}")
    assert isinstance(straight, dict)
    results = {}
    for way, sharded in ways.items():
        run = partial(train, layout, optimizer, to=way, sharded=sharded)
        code, said = in_a_fork(partial(run, more=[KillAt()]), next(numbers))
        if code != -signal.SIGKILL:
            results[way] = f"save: {said}"
            continue
        code, resumed = in_a_fork(partial(run, resume=f"{way}/step-{SAVE:08d}.ckpt"), next(numbers))
        if code != 0:
            results[way] = f"resume: {resumed}"
            continue
        assert isinstance(resumed, dict)
        differ = different(resumed["train/loss"], straight["train/loss"][SAVE:])
        differ += different(resumed["parameters"], straight["parameters"])
        last = f"step-{STEPS:08d}.ckpt"
        kept = ("state_dict", "optimizer_states", "global_step")
        one, other = (read(Path(folder) / last) for folder in (way, "straight"))
        differ += different({k: one[k] for k in kept}, {k: other[k] for k in kept})
        results[way] = "exact" if differ == 0 else f"{differ} values differ"
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
    layout, names, numbers = sys.argv[1], sys.argv[2].split("|"), count()
    launch.report(**{name: cell(layout, name, numbers) for name in names})


if __name__ == "__main__":
    main()
