"""`python -m lit_llm certify`: check on this machine what the library promises, and write a certificate.

Each check has a promise, a figure and a tolerance. It passes, fails (exit code 1, with the command that repeats it) or is
skipped with the reason. Nothing that was not run is called passed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

from lit_llm.certify.check import certificate, run_checks, summary, table
from lit_llm.commands.new_output import REPLACE_HELP, new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError, report


def main(arguments: list[str]) -> int:
    """Print the table and write the certificate. Returns 0, 1 if a check failed, 2 if a device died.

    Raises:
        UserError: There are fewer devices than asked for, the budget is too small, or the file cannot be written.
    """
    flags = OwnFlags(alone=True, prog="python -m lit_llm certify", description=__doc__)
    flags.add_argument("--devices", type=int, default=1, help="GPUs, or processes on a machine without one")
    flags.add_argument("--budget", type=float, default=10.0, help="minutes; checks that are not reached are skipped")
    flags.add_argument("--out", type=Path, default=Path("certificate.json"), help="the certificate")
    flags.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks only")
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    own = flags.parse(arguments)
    if own.devices < 1:
        raise UserError(f"devices is {own.devices}, but a check needs at least 1 (--devices)")
    if not own.budget > 0 or own.budget == float("inf"):
        raise UserError(f"budget is {own.budget:g} minutes, but a check needs more than 0 (--budget)")
    import torch

    from lit_llm.certify.checks import groups

    device, on = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", None)
    if on is not None and on < own.devices:
        raise UserError(f"devices is {own.devices}, but this machine has {on} (--devices)")
    named = torch.cuda.get_device_name() if device == "cuda" else "CPU process"
    with new_file(own.out, replace=own.replace) as partial:
        partial.touch()  # a folder that cannot be written is found before the checks
        outcomes, ended = run_checks(groups(own.devices, device), tuple(own.only), own.devices, own.budget * 60)
        machine = _machine(named, own.devices)
        partial.write_text(json.dumps(certificate(outcomes, machine, ended), indent=1, allow_nan=False) + "\n")
    print(table(outcomes))
    print(summary(outcomes, f"{own.devices} x {named}, torch {torch.__version__}"))
    if ended is not None:
        report(f"{ended}; the certificate has what was shown before")
        return 2
    return int(any(each.outcome == "failed" for each in outcomes))


def _machine(device: str, count: int) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("lit_llm", "torch", "lightning")}
    return {
        "device": device,
        "devices": count,
        "cores": os.cpu_count(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
