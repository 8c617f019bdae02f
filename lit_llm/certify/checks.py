"""The list of checks for a number of devices: what is promised, which jobs show it, and when it passes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lit_llm.certify import attention
from lit_llm.certify.cells import PLAIN, TOLERANCES, cells, layouts
from lit_llm.certify.check import Check, Figure, Group
from lit_llm.certify.links import KINDS, dimensions

HOW: dict[str, dict[str, Any]] = {"whole": {}, "sharded": {"sharded": True}, "asynchronous": {"background": True}}
STEPS, KILLED_AT = 8, 7  # saved after 3 and 6; an asynchronous save at 6 waits for that at 3, so one is complete
SAVED_AT, CONTINUED_TO = 3, 6
MEMORY_TOLERANCE = {"cpu": 0.03, "cuda": 0.1}
"""On a CPU the planner counts tensors; on a GPU kernels and the allocator add what it estimates."""
TRAFFIC_TOLERANCE = 0.01  # the plan leaves out single numbers: sums of losses and norms
LINK_TOLERANCE = 2.0  # bandwidths of data sheets are reached by large messages only
SPEED_TOLERANCE = 1.05
LOSSES = "20 steps have the losses of one process"
MEGABYTES = {"cpu": 16.0, "cuda": 512.0}

Losses = dict[str, Any]  # what `training.train` finds


def groups(devices: int, device: str, *, place: str, assumed_gbps: float | None = None) -> list[Group]:
    """All checks; those with required ones first, then by the time that they take.

    Args:
        device: "cpu" or "cuda".
        place: folder whose disk is measured.
        assumed_gbps: what the plan assumes of a link between two devices of a node.
    """
    on_cpu = device == "cpu"
    of = cells(devices, float8=not on_cpu)
    plain = [name for name, job in of.items() if all(job[key] == value for key, value in PLAIN.items())]
    eager = [name for name, job in of.items() if name not in plain and not job["compile"]]
    compiled = [name for name, job in of.items() if job["compile"]]
    names = layouts(devices)
    kinds = [(layout, how) for how in HOW for layout in names if how != "sharded" or isinstance(names[layout], dict)]
    one_device = "there is only one device"
    return [
        _attention(device),
        _losses(devices, device, {name: of[name] for name in plain}),
        *(_resume(devices, device, layout, how) for layout, how in kinds if how == "whole"),
        _plan(devices, device),
        _graphs(device),
        _waits(device),
        _links(devices, device, assumed_gbps),
        _disk(device, place),
        _speed(device),
        _losses(devices, device, {name: of[name] for name in eager}),
        *(_resume(devices, device, layout, how) for layout, how in kinds if how != "whole"),
        _cross(devices, device) if devices > 1 else Group("", (), unless=one_device),
        _losses(devices, device, {name: of[name] for name in compiled}),
        *([_float8()] if on_cpu else []),
    ]


def difference(found: dict[str, float], expected: dict[str, float], first: int = 1) -> float:
    """The largest relative difference of two runs' losses from a step on; infinite if their steps differ."""
    expected = {step: value for step, value in expected.items() if int(step) >= first}
    if found.keys() != expected.keys() or not expected:
        return float("inf")
    differences = [abs(found[step] - value) / abs(value) for step, value in expected.items()]
    return float("nan") if any(each != each for each in differences) else max(differences)


def _attention(device: str) -> Group:
    kinds = [
        (kernel, kind)
        for kernel, kind in itertools.product(attention.KERNELS, attention.KINDS)
        if kind == "causal" or kernel not in ("sdpa", "flash3", "flash4")  # these are for plain causal attention
    ]
    jobs = {f"attention/{kernel}/{kind}": {"do": "attention", "kernel": kernel, "kind": kind} for kernel, kind in kinds}
    checks = tuple(
        Check(
            name,
            (name,),
            partial(_within, "error", attention.TOLERANCES.get(job["kernel"], attention.FP32_TOLERANCE)),
            required=job["kernel"] in ("sdpa", "blocks"),
        )
        for name, job in jobs.items()
    )
    return Group("output and gradients equal attention in float64", checks, ((1, _on(device, jobs)),))


def _within(key: str, tolerance: float | None, found: dict[str, Any], *, unit: str = "") -> Figure:
    return Figure(found[key], tolerance, unit)


def _on(device: str, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**job, "accelerator": device} for name, job in jobs.items()}


def _losses(devices: int, device: str, of: dict[str, dict[str, Any]]) -> Group:
    """Each cell against one process of the same precision and optimizer, without compilation and recomputation."""
    alone: dict[str, dict[str, Any]] = {}
    checks = []
    for name, job in of.items():
        reference = f"one process, {job['precision']}, {job['optimizer']}"
        alone[reference] = {"do": "train", "precision": job["precision"], "optimizer": job["optimizer"]}
        is_plain = all(job[key] == value for key, value in PLAIN.items())
        judge = partial(_same_losses, TOLERANCES[job["precision"]], job["compile"], is_plain)
        checks.append(Check(name, (name, reference), judge, required=is_plain))
    return Group(LOSSES, tuple(checks), ((1, _on(device, alone)), (devices, _on(device, of))))


def _same_losses(tolerance: float, is_compiled: bool, keep: bool, found: Losses, alone: Losses) -> Figure | str:
    if is_compiled and not found["graphs"]:
        return "nothing was compiled"
    details = {"step_seconds": found["step_seconds"], "graphs": found["graphs"]}
    if keep:
        details |= {"losses": [round(value, 6) for value in found["losses"].values()]}
    return Figure(difference(found["losses"], alone["losses"]), tolerance, details=details)


def _resume(devices: int, device: str, layout: str, how: str) -> Group:
    """A run whose processes were all killed is continued from its newest checkpoint."""
    job = {"do": "train", "strategy": layouts(devices)[layout], "steps": STEPS, **HOW[how]}
    starts = (
        (devices, _on(device, {"killed": {**job, "save": "saved", "kill_at": KILLED_AT}})),
        (devices, _on(device, {"straight": job, "resumed": {**job, "resume": "saved"}})),
    )
    jobs = ("killed", "straight", "resumed")
    check = Check(f"resume/{layout}/{how}", jobs, _resumed, required=how == "whole")
    return Group("after SIGKILL a run continues bit for bit", (check,), starts)


def _resumed(killed: Losses, straight: Losses, resumed: Losses) -> Figure:
    first = min(map(int, resumed["losses"]), default=1)
    was_killed = not killed and first > 1
    return Figure(difference(resumed["losses"], straight["losses"], first) if was_killed else float("inf"), 0.0)


def _cross(devices: int, device: str) -> Group:
    """A checkpoint of each layout in each other, in shards if the layout has them."""
    of = layouts(devices)
    train = {"do": "train", "steps": CONTINUED_TO}
    save = {
        f"save {name}": {
            **{"do": "train", "strategy": strategy, "steps": SAVED_AT, "save": name, "sharded": isinstance(strategy, dict)}
        }
        for name, strategy in of.items()
    }
    pairs = list(itertools.permutations(of, 2))
    go_on = {f"{one} in {other}": {**train, "strategy": of[other], "resume": one} for one, other in pairs}
    checks = tuple(
        Check(f"checkpoint/{one}/in/{other}", (f"save {one}", f"{one} in {other}", "straight"), _continued)
        for one, other in pairs
    )
    starts = ((1, _on(device, {"straight": train})), (devices, _on(device, {**save, **go_on})))
    return Group("a checkpoint of one layout continues in another", checks, starts)


def _continued(saved: Losses, found: Losses, straight: Losses) -> Figure:
    return Figure(difference(found["losses"], straight["losses"], SAVED_AT + 1), TOLERANCES["32-true"])


def _plan(devices: int, device: str) -> Group:
    job = {"do": "train", "size": "small", "micro_batch": 2, "steps": 6, "watch": "plan"}
    jobs = {f"plan {name}": {**job, "strategy": strategy} for name, strategy in layouts(devices).items()}
    checks = []
    for name in layouts(devices):
        checks.append(
            Check(f"plan/memory/{name}", (f"plan {name}",), partial(_planned, "bytes", MEMORY_TOLERANCE[device]), required=True)
        )
        if devices > 1:
            judge = partial(_planned, "sent", TRAFFIC_TOLERANCE)
            checks.append(Check(f"plan/traffic/{name}", (f"plan {name}",), judge, required=True))
    return Group("peak memory and bytes sent are those of the plan", tuple(checks), ((devices, _on(device, jobs)),))


def _planned(what: str, tolerance: float, found: dict[str, Any]) -> Figure:
    planned, measured = found[f"planned_{what}"], found["peak_bytes" if what == "bytes" else "sent"]
    more = {"collectives": found["collectives"]} if what == "sent" else {"reserved": found["reserved_bytes"]}
    return Figure(abs(planned / measured - 1), tolerance, details={"planned": planned, "measured": measured, **more})


def _graphs(device: str) -> Group:
    job = {"do": "train", "compile": True, "micro_batch": 3, "steps": 6, "watch": "graphs"}
    check = Check("graphs/ramp, validation, generation", ("graphs",), _few_graphs, required=False)
    return Group("at most 3 graphs, without a break", (check,), ((1, _on(device, {"graphs": job})),))


def _few_graphs(found: dict[str, Any]) -> Figure | str:
    if not found["graphs"]:
        return "nothing was compiled"
    return Figure(found["graphs"] if not found["graph_breaks"] else float("inf"), 3, details={"breaks": found["graph_breaks"]})


def _waits(device: str) -> Group:
    job = {"do": "train", "steps": 20, "log_every": 10, "watch": "waits"}
    check = Check("waits/host synchronisations", ("waits",), _no_waits, required=device == "cuda")
    why = "" if device == "cuda" else f"torch finds host synchronisations on CUDA only, and this device is {device}"
    return Group("the host waits for the device in logged steps only", (check,), ((1, _on(device, {"waits": job})),), why)


def _no_waits(found: dict[str, Any]) -> Figure:
    return Figure(found["waits"], 0, details={"places": found["places"]})


def _links(devices: int, device: str, assumed: float | None) -> Group:
    names = [f"{name}/{kind}" for name in dimensions(devices) for kind in KINDS]
    checks = tuple(Check(f"links/{name}", ("links",), partial(_link, name, assumed)) for name in names)
    job = {"do": "links", "megabytes": MEGABYTES[device]}
    return Group("links are as fast as the plan assumes", checks, ((devices, _on(device, {"links": job})),))


def _link(name: str, assumed: float | None, found: dict[str, float]) -> Figure:
    if assumed is None:
        return Figure(found[name], unit="GB/s")
    return Figure(assumed / found[name], LINK_TOLERANCE, "of measured", {"gbps": found[name], "assumed_gbps": assumed})


def _disk(device: str, place: str) -> Group:
    job = {"do": "disk", "place": place, "megabytes": 4 * MEGABYTES[device]}
    judges = {way: partial(_within, way, None, unit="GB/s") for way in ("write", "fsync", "read")}
    checks = tuple(Check(f"disk/{way}", ("disk",), judge) for way, judge in judges.items())
    return Group("speed of a checkpoint on this disk", checks, ((1, {"disk": job}),))


def _speed(device: str) -> Group:
    """Judged on a GPU only: on a CPU other processes share the cores."""
    options = {"size": "small", "micro_batch": 2, "threads": os.cpu_count()}
    if device == "cuda":
        options = {"size": "gpt2-124m", "micro_batch": 8, "precision": "bf16-mixed", "compile": True}
    job = {"do": "train", "steps": 30, "log_every": 10, "watch": "speed", **options}
    starts = ((1, {**_on(device, {"speed": job}), "loader": {"do": "loader", "size": options["size"], "micro_batch": 2}}),)
    on_gpu = device == "cuda"
    checks = (
        Check("speed/plain loop", ("speed",), partial(_speed_of, SPEED_TOLERANCE if on_gpu else None)),
        Check("speed/loader", ("loader", "speed"), partial(_loader, 1.0 if on_gpu else None)),
    )
    return Group("a step takes as long as in a plain loop of the same block", checks, starts)


def _speed_of(tolerance: float | None, found: dict[str, Any]) -> Figure:
    keys = ("plain_seconds", "tokens_per_second", "mfu", "speed")
    return Figure(found["ratio"], tolerance, "x", {key: found[key] for key in keys})


def _loader(tolerance: float | None, loader: dict[str, float], found: dict[str, Any]) -> Figure:
    step = found["speed"]["measured"]["step_seconds"]
    return Figure(loader["seconds"] * found["speed"]["settings"]["global_batch"] / 2 / step, tolerance, "of a step")


def _float8() -> Group:
    judge: Callable[..., Figure | str] = lambda: ""  # noqa: E731
    why = "compute.float8 needs an NVIDIA GPU of compute capability 8.9 or more"
    return Group(LOSSES, (Check("losses/float8", (), judge),), unless=why)
