"""The list of checks for a number of devices."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lit_llm.certify.cells import TOLERANCES, cells, layouts
from lit_llm.certify.check import DeviceDied, Group, Outcome, failed, judged, skipped
from lit_llm.certify.processes import need, run_ranks

LOSSES = "the losses of one process"
RESUME = "a resumed run equals the uninterrupted one"
WAITS = "no host synchronisation between two logged steps"
HOW: dict[str, dict[str, Any]] = {"whole": {}, "sharded": {"sharded": True}, "asynchronous": {"background": True}}
STEPS, KILLED_AT = 8, 7  # saved after 3 and 6; an asynchronous save at 6 waits for that at 3, so one is complete


def difference(found: dict[str, float], expected: dict[str, float], first: int = 1) -> float:
    """The largest relative difference of two runs' losses from a step on; infinite if their steps differ."""
    expected = {step: value for step, value in expected.items() if int(step) >= first}
    if found.keys() != expected.keys() or not expected:
        return float("inf")
    differences = [abs(found[step] - value) / abs(value) for step, value in expected.items()]
    return float("nan") if any(each != each for each in differences) else max(differences)


def groups(devices: int, device: str) -> list[Group]:
    """All checks, the quick ones first."""
    from lit_llm.certify import attention, graphs

    waits = "waits/host synchronisations"
    reason = f"torch finds host synchronisations on CUDA only, and this device is {device}"
    if device == "cuda":
        reason = "this check is not written for GPUs yet"
    names = layouts(devices)
    kinds = [f"resume/{layout}/{how}" for layout in names for how in HOW if how != "sharded" or layout not in ("ddp", "one")]
    return [
        Group(attention.PROMISE, attention.NAMES, lambda chosen, _: [attention.check(name, device) for name in chosen]),
        Group(graphs.PROMISE, (graphs.NAME,), lambda chosen, _: [graphs.check(name, device) for name in chosen]),
        Group(WAITS, (waits,), lambda chosen, _: [skipped(name, WAITS, reason) for name in chosen]),
        Group(LOSSES, tuple(cells(devices)), lambda chosen, seconds: losses(devices, device, chosen, seconds)),
        *(Group(RESUME, (name,), lambda chosen, left: [resume(devices, device, chosen[0], left)]) for name in kinds),
    ]


def losses(devices: int, device: str, names: tuple[str, ...], seconds: float) -> list[Outcome]:
    """Each cell against one process of the same precision and optimizer, without compilation or recomputation."""
    from lit_llm.distributed.block_kernels import no_compiler

    jobs = {name: {**job, "accelerator": device} for name, job in cells(devices).items() if name in names}
    why = _no_compiler(no_compiler, device)
    run = {name: job for name, job in jobs.items() if not (job["compile"] and why)}
    plain = {f"{job['precision']}, {job['optimizer']}": _plain(job) for job in run.values()}
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        alone, ended = _ranks(Path(folder), 1, plain, seconds)
        if ended is not None:
            raise DeviceDied(ended, [])
        for name in plain:
            need(alone, name)
        found, ended = _ranks(Path(folder), devices, run, seconds)
    broken = any("failed" in each for each in found.values())
    outcomes = []
    for name, job in jobs.items():
        if name not in run:
            outcomes.append(skipped(name, LOSSES, why or ""))
        elif "losses" in found.get(name, {}):
            expected = need(alone, f"{job['precision']}, {job['optimizer']}")
            outcomes.append(judged(name, LOSSES, difference(found[name]["losses"], expected), TOLERANCES[job["precision"]]))
        elif "failed" in found.get(name, {}):
            outcomes.append(failed(name, LOSSES, found[name]["failed"]))
        elif name in found:
            outcomes.append(skipped(name, LOSSES, found[name]["refused"]))
        elif ended is None or broken:
            outcomes.append(skipped(name, LOSSES, ended or "the budget was spent"))
    if ended is not None and not broken:
        raise DeviceDied(ended, outcomes)
    return outcomes


def resume(devices: int, device: str, name: str, seconds: float) -> Outcome:
    """A run that all its processes were killed in continues from its newest checkpoint, bit for bit."""
    from lit_llm.checkpoint.format import newest_good

    _, layout, how = name.split("/")
    job = {"strategy": layouts(devices)[layout], "steps": STEPS, "accelerator": device, **HOW[how]}
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        killed, _ = _ranks(Path(folder), devices, {"killed": {**job, "save": "saved", "kill_at": KILLED_AT}}, seconds)
        saved, _ = newest_good(Path(folder) / "saved")
        if refused := [each["refused"] for each in killed.values() if "refused" in each]:
            return skipped(name, RESUME, refused[0])
        if killed or saved is None:
            reasons = [each.get("failed", "the run was not killed") for each in killed.values()]
            return failed(name, RESUME, reasons[0] if reasons else "no checkpoint was complete when the run was killed")
        continued = {"straight": job, "resumed": {**job, "resume": f"saved/{saved.name}"}}
        found, ended = _ranks(Path(folder), devices, continued, seconds)
        first = int(saved.name.removeprefix("step-").removesuffix(".ckpt")) + 1
    if errors := [each["failed"] for each in found.values() if "failed" in each]:
        return failed(name, RESUME, errors[0])
    if ended is not None:
        raise DeviceDied(ended, [])
    return judged(name, RESUME, difference(need(found, "resumed"), need(found, "straight"), first), 0.0)


def _ranks(folder: Path, devices: int, jobs: dict[str, Any], seconds: float) -> tuple[dict[str, Any], str | None]:
    from lit_llm.certify.training import TEXT

    (folder / "text.txt").write_text(TEXT)
    return run_ranks(folder, devices, jobs, seconds) if jobs else ({}, None)


def _plain(job: dict[str, Any]) -> dict[str, Any]:
    return {key: job[key] for key in ("precision", "optimizer", "accelerator")}


def _no_compiler(no_compiler: Any, device: str) -> str | None:
    import torch

    return no_compiler(torch.device(device))
