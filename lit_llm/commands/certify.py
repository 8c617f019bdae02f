"""`python -m lit_llm certify`: check on this machine what the library promises, and write a certificate.

A check has a promise, a measured figure and a tolerance. It passes, fails (exit code 1; a line has the command that repeats the
check) or is skipped with a reason; a required check that is skipped fails. A figure without a tolerance is only recorded. On a
node, `torchrun -m lit_llm certify` checks as many devices as torchrun has processes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from lit_llm.certify.check import KINDS, Outcome, by_kind, certificate, run_checks, summary, table
from lit_llm.certify.processes import run_ranks
from lit_llm.commands.new_output import REPLACE_HELP, new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError, report
from lit_llm.core.number_domain import above, whole
from lit_llm.core.ranks import is_rank_zero, is_torchrun


def main(arguments: list[str]) -> int:
    """Run the checks, print a line for each check, and write the certificate.

    Returns the exit code: 2 if a process of a device ended by itself, 1 if a check failed or no check passed, else 0.
    """
    flags = OwnFlags("certify", alone=True, description=__doc__)
    flags.add_argument("--devices", range=whole(1, 4096), help="GPUs, or processes on a machine without one; 1")
    flags.add_argument("--budget", range=above(0, 10**5), default=10.0, help="minutes; then nothing is started")
    flags.add_argument("--out", type=Path, default=Path("certificate.json"), help="the certificate")
    flags.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these checks only; losses: all of these, required: those"
    )
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    own = flags.parse(arguments)
    devices, is_first = _devices(own.devices)
    if not is_first:
        return 0  # under torchrun, the first process starts its own processes on all devices
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # processes that use a GPU are forked from this one
    import torch

    from lit_llm.certify.promises import groups

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < devices:
        raise UserError(f"devices is {devices}, but this machine has {torch.cuda.device_count()} (--devices)")
    began = time.monotonic()
    with new_file(own.out, replace=own.replace) as partial:
        partial.touch()  # a folder that cannot be written is found before the checks
        name, assumed = _gpu() if device == "cuda" else ("CPU process", None)
        todo = groups(devices, device, place=str(partial.parent), assumed_gbps=assumed)
        more = {count: groups(count, device, place="") for count in (2, 4) if count > devices}
        outcomes, ended = run_checks(todo, tuple(own.only), device, own.budget * 60, lambda shown: _say(shown, devices), more)
        said = summary(outcomes, f"{devices} × {name}, torch {torch.__version__}")
        machine = _machine(name, devices, time.monotonic() - began)
        content = certificate(outcomes, machine, ended, said)
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for row in (KINDS, *by_kind(content["checks"])):
        print("{:12s}{:>8s}{:>11s}{:>8s}{:>9s}{:>10s}  {}".format(*row).rstrip())
    print(said)
    if ended is not None:
        report(f"{ended}; the certificate has what was shown before")
        return 2
    return int(not said.startswith("certified"))


def _say(outcomes: list[Outcome], devices: int) -> None:
    for line in table(outcomes, devices):
        print(line, flush=True)


def _devices(asked: int | None) -> tuple[int, bool]:
    """Return (number of devices, whether this process runs the checks). Under torchrun, only the first process runs them."""
    if not is_torchrun():
        return asked or 1, True
    world, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != world:
        raise UserError(f"certify takes the devices of one node, but torchrun has {here} of {world} processes on this one")
    if asked not in (None, world):
        raise UserError(f"devices is {asked}, but torchrun started {world} processes: leave out --devices")
    return world, is_rank_zero()


def _gpu() -> tuple[str, float | None]:
    """Return (name of the GPU, GB/s that `plan` assumes for its links). A forked process reads both: this one uses no CUDA."""
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        results, ended = run_ranks(Path(folder), 1, "cuda", {"gpu": {"do": "gpu"}}, 60)
    if "found" not in results.get("gpu", {}):
        raise UserError(f"the GPU cannot be used: {ended or 'it does not answer'}")
    return results["gpu"]["found"]["name"], results["gpu"]["found"]["node_gbps"]


def _machine(device: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        "device": device,
        "devices": count,
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in ("lit_llm", "torch", "lightning")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds),
        "code": fingerprints(),
    }


def fingerprints() -> dict[str, str]:
    """Return {folder of lit_llm: hash of its code without comment and blank lines}, to find certificates of other code."""
    hashes, root = {}, Path(__file__).parents[1]
    for room in sorted(path for path in root.iterdir() if (path / "__init__.py").exists()):
        lines: list[str] = []
        for path in sorted(room.resolve().rglob("*.py")):
            code = path.read_text(encoding="utf-8").splitlines()
            lines += [path.name, *(line.rstrip() for line in code if line.strip() and not line.lstrip().startswith("#"))]
        hashes[room.name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return hashes
