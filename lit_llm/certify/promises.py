"""The list of all checks for a number of devices: promises, jobs, and the functions that judge the results of jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lit_llm.certify.cells import AXES, PLAIN, TOLERANCES, cells, layouts
from lit_llm.certify.check import Check, Figure, Group
from lit_llm.certify.links import dimensions

HOW: dict[str, dict[str, Any]] = {"whole": {}, "sharded": {"sharded": True}, "asynchronous": {"background": True}}
STEPS, KILLED_AT = 8, 7  # saved after 3 and 6; an asynchronous save at 6 waits for the save at 3, so one is complete
SAVED_AT, CONTINUED_TO = 3, 6
MEMORY_TOLERANCE = {"cpu": 0.03, "cuda": 0.1}
"""{device: largest relative difference of planned and measured memory}. On a CPU, gloo's threads free some tensors late. On a
GPU, the plan also estimates the memory inside of kernels."""
TRAFFIC_TOLERANCE = 0.01  # the plan leaves out single numbers: sums of losses and norms
LINK_TOLERANCE = 2.0  # only large messages reach the bandwidths of data sheets
SPEED_TOLERANCE = 1.05
MOST_GRAPHS = 3
LOSSES = "20 steps have the losses of one process"
FLOAT8 = "compute.float8 needs an NVIDIA GPU of compute capability 8.9 or more"
WAITS = "torch finds host synchronisations on CUDA only"

Found = dict[str, Any]  # the result of a job
Jobs = dict[str, dict[str, Any]]


def groups(devices: int, device: str, *, place: str, assumed_gbps: float | None = None) -> list[Group]:
    """Return all groups of checks: groups with required checks first, then other groups, roughly by their duration.

    Args:
        device: "cpu" or "cuda". Times have a tolerance on "cuda" only, because processes share the cores of a CPU.
        place: folder whose disk is measured.
        assumed_gbps: GB/s that the plan assumes for a link between two devices of a node. None: unknown.
    """
    on_gpu, of = device == "cuda", layouts(devices)
    trained = cells(devices, float8=on_gpu)
    plain = {name: job for name, job in trained.items() if _is_plain(job)}
    eager = {name: job for name, job in trained.items() if name not in plain and not job["compile"]}
    compiled = {name: job for name, job in trained.items() if job["compile"]}
    ways = [(how, name) for how in HOW for name in of if how != "sharded" or isinstance(of[name]["strategy"], dict)]
    ordered_groups = [
        _losses(devices, plain),
        *(_resume(devices, of[name], name, how) for how, name in ways if how == "whole"),
        _plan(devices, MEMORY_TOLERANCE[device]),
        _graphs(),
        _waits(on_gpu),
        _speed(on_gpu),
        _disk(place, 2048 if on_gpu else 64),
        _links(devices, assumed_gbps, 512 if on_gpu else 16),
        _losses(devices, eager),
        *(_resume(devices, of[name], name, how) for how, name in ways if how != "whole"),
        _cross(devices),
        _losses(devices, compiled),
    ]
    return ordered_groups if on_gpu else [*ordered_groups, Group(LOSSES, (Check("losses/float8", (), Figure),), unless=FLOAT8)]


def difference(losses: dict[str, float], expected: dict[str, float], first: int = 1) -> float:
    """Return the largest relative difference of two runs' losses ({step: loss}) from step `first` on: infinity if the steps
    differ, NaN if a loss is NaN."""
    expected = {step: value for step, value in expected.items() if int(step) >= first}
    if losses.keys() != expected.keys() or not expected:
        return float("inf")
    differences = [abs(losses[step] - value) / abs(value) for step, value in expected.items()]
    return float("nan") if any(each != each for each in differences) else max(differences)


def _is_plain(job: Found) -> bool:
    return tuple(job[axis] for axis in AXES) == PLAIN


def _losses(devices: int, jobs: Jobs) -> Group:
    """Return the checks that compare the losses of each training in `jobs` with those of a training in one process with the
    same precision, optimizer and model, without compilation and recomputation.
    """
    alone: Jobs = {}
    checks = []
    for name, job in jobs.items():
        shared: dict[str, Any] = {key: job[key] for key in ("precision", "optimizer", "size") if key in job}
        reference = ", ".join(("one process", *shared.values()))
        alone[reference] = {"do": "train", **shared}
        checks.append(Check(name, (name, reference), partial(_same_losses, job), _is_plain(job)))
    return Group(LOSSES, tuple(checks), ((1, alone), (devices, jobs)))


def _same_losses(job: dict[str, Any], result: Found, alone: Found) -> Figure | str:
    if job["compile"] and not result["graphs"]:
        return "nothing was compiled"
    details = {"step_seconds": result["step_seconds"], "losses": [round(value, 6) for value in result["losses"].values()]}
    return Figure(difference(result["losses"], alone["losses"]), TOLERANCES[job["precision"]], details=details)


def _resume(devices: int, layout: dict[str, Any], name: str, how: str) -> Group:
    """Return a group with one check: a killed run continues bit for bit from its newest checkpoint. `how`: a key of HOW."""
    job = {"do": "train", **layout, "steps": STEPS, **HOW[how]}
    killed = {"killed": {**job, "save": "saved", "kill_at": KILLED_AT}}
    starts = ((devices, killed), (devices, {"straight": job, "resumed": {**job, "resume": "saved"}}))

    def judge(killed: Found, straight: Found, resumed: Found) -> Figure:
        first = min(map(int, resumed["losses"]), default=1)
        was_killed = not killed and first > 1
        return Figure(difference(resumed["losses"], straight["losses"], first) if was_killed else float("inf"), 0.0)

    check = Check(f"resume/{name}/{how}", ("killed", "straight", "resumed"), judge, how == "whole")
    return Group("after SIGKILL a run continues bit for bit", (check,), starts)


def _cross(devices: int) -> Group:
    """Return the checks that a checkpoint of each layout can be continued in the next layout of the same model, with the
    losses of an uninterrupted run. A checkpoint is sharded if the layout that saves it uses MeshStrategy.
    """
    of, train = layouts(devices), {"do": "train", "steps": CONTINUED_TO}
    size = {name: of[name].get("size", "tiny") for name in of}
    alone: Jobs = {f"straight {each}": {**train, "size": each} for each in dict.fromkeys(size.values())}
    jobs: Jobs = {}
    for name, layout in of.items():
        shards = isinstance(layout["strategy"], dict)
        jobs[f"save {name}"] = {**train, **layout, "steps": SAVED_AT, "save": name, "sharded": shards}
    alike = [[name for name in of if size[name] == each] for each in dict.fromkeys(size.values())]
    pairs = [(one, other) for names in alike if len(names) > 1 for one, other in zip(names, names[1:] + names[:1], strict=True)]
    jobs |= {f"{one} in {other}": {**train, **of[other], "resume": one} for one, other in pairs}

    def judge(saved: Found, continued: Found, straight: Found) -> Figure:
        return Figure(difference(continued["losses"], straight["losses"], SAVED_AT + 1), TOLERANCES["32-true"])

    checks = (Check(f"checkpoint/{a}/in/{b}", (f"save {a}", f"{a} in {b}", f"straight {size[a]}"), judge) for a, b in pairs)
    return Group("a checkpoint of one layout continues in another", tuple(checks), ((1, alone), (devices, jobs)))


def _plan(devices: int, tolerance: float) -> Group:
    job = {"do": "train", "micro_batch": 2, "batch": 2 * max(4, devices), "steps": 5, "watch": "plan"}
    sizes = {"tiny": "small", "experts": "small-experts"}
    jobs: Jobs = {
        f"plan {name}": {**job, **layout, "size": sizes[layout.get("size", "tiny")]}
        for name, layout in layouts(devices).items()
    }

    def judge(what: str, tolerance: float, result: Found) -> Figure:
        planned, measured = result[what]["planned"], result[what]["measured"]
        return Figure(abs(planned / measured - 1), tolerance, details=result[what])

    of = {"memory": tolerance} | ({"traffic": TRAFFIC_TOLERANCE} if devices > 1 else {})
    checks = (
        Check(f"plan/{what}/{name}", (f"plan {name}",), partial(judge, what, most), required=True)
        for name in layouts(devices)
        for what, most in of.items()
    )
    return Group("peak memory and bytes sent are those of the plan", tuple(checks), ((devices, jobs),))


def _graphs() -> Group:
    def judge(result: Found) -> Figure | str:
        if not result["graphs"]:
            return "nothing was compiled"
        return Figure(result["graphs"] if not result["graph_breaks"] else float("inf"), MOST_GRAPHS)

    job = {"do": "train", "compile": True, "micro_batch": 3, "batch": 24, "steps": 6, "ramp": (6, 12), "watch": "graphs"}
    checks = (Check("graphs/ramp, validation, generation", ("graphs",), judge),)
    return Group(f"at most {MOST_GRAPHS} graphs, without a break", checks, ((1, {"graphs": job}),))


def _waits(on_gpu: bool) -> Group:
    job = {"do": "train", "steps": 20, "log_every": 10, "watch": "waits"}
    judge: Callable[..., Figure] = lambda result: Figure(len(result["waits"]), 0, details=result)  # noqa: E731
    checks = (Check("waits/host synchronisations", ("waits",), judge, required=on_gpu),)
    promise = "the host waits for the device in logged steps only"
    return Group(promise, checks, ((1, {"waits": job}),), "" if on_gpu else WAITS)


def _links(devices: int, assumed: float | None, megabytes: int) -> Group:
    def judge(name: str, speeds: dict[str, float]) -> Figure:
        details = {"gbps": speeds[name], "assumed_gbps": assumed}
        if assumed is None:
            return Figure(speeds[name], unit="GB/s", details=details)
        return Figure(assumed / speeds[name], LINK_TOLERANCE, "x slower", details)

    names = [f"{name}/all_reduce" for name in dimensions(devices)]
    checks = tuple(Check(f"links/{name}", ("links",), partial(judge, name)) for name in names)
    return Group("links are as fast as the plan assumes", checks, ((devices, {"links": {"do": "links", "mb": megabytes}}),))


def _disk(place: str, megabytes: int) -> Group:
    def judge(way: str, speeds: dict[str, float]) -> Figure:
        return Figure(speeds[way], unit="GB/s", details={"gbps": speeds[way]})

    checks = tuple(Check(f"disk/{way}", ("disk",), partial(judge, way)) for way in ("write", "fsync", "read"))
    return Group(
        "speed of a checkpoint on this disk", checks, ((1, {"disk": {"do": "disk", "place": place, "mb": megabytes}}),)
    )


def _speed(on_gpu: bool) -> Group:
    options: dict[str, Any] = {"size": "small", "micro_batch": 4, "batch": 4, "steps": 12, "threads": os.cpu_count()}
    if on_gpu:
        options = {"size": "gpt2-124m", "micro_batch": 8, "batch": 8, "steps": 30, "precision": "bf16-mixed", "compile": True}

    def judge(name: str, tolerance: float, result: Found) -> Figure:
        return Figure(result[name], tolerance if on_gpu else None, "x", result["speeds"])

    checks = (
        Check("speed/plain loop", ("speed",), partial(judge, "step_by_plain_step", SPEED_TOLERANCE)),
        Check("speed/loader", ("speed",), partial(judge, "loading_by_step", 1.0)),
    )
    job = {"do": "train", "log_every": 10, "watch": "speed", **options}
    return Group("a step is as fast as a plain loop of the same block", checks, ((1, {"speed": job}),))
