"""`python -m lit_llm plan`: the memory, time and cost of a run before its start, from the recipe that `fit` takes."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import REPLACE_HELP, write_new
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments, own_tokenizer
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.core.hardware import Hardware, table, this_machine
from lit_llm.core.memory import without_garbage_collection
from lit_llm.core.number_domain import STEPS, Domain, above, at_least, whole
from lit_llm.core.number_text import counted
from lit_llm.plan import Options, Plan, PlannedRun, as_dict, find, make_plan, sweep
from lit_llm.plan.budget import budget
from lit_llm.plan.measured_run import MeasuredRun, certified_run, differences, measured_run
from lit_llm.plan.speed import SAVE_GBPS, with_slowness
from lit_llm.runs.run_folder import CONFIG, expanded

SECONDS_BETWEEN_LINES = 10.0
"""Shortest time, in seconds, between two printed lines of progress while combinations are planned."""


def own_flags() -> OwnFlags:
    parser = OwnFlags(
        "plan",
        description="The budget of a run before it starts. The exit code is 1 if it does not fit, or no "
        "combination does. Takes every flag of `fit` (--config …), and these:",
    )
    add = parser.add_argument
    add("--hardware", metavar="NAME", help="a name of the table in lit_llm/core/hardware.yaml, a YAML file with the "
        "same keys, or auto: measure this machine. Default: this machine, unmeasured.")  # fmt: skip
    add(
        "--devices",
        range=whole(1, 10_000_000),
        metavar="N",
        help="devices in all. Default: the recipe's trainer.devices x num_nodes.",
    )
    add(
        "--mfu",
        range=Domain(0, 1, above_low=True),
        metavar="F",
        help="useful FLOP/s over the dense peak while computing. Default: fitted to published runs.",
    )
    add(
        "--scaling_efficiency",
        range=Domain(0, 1, above_low=True),
        metavar="F",
        help="computing time over step time. Default: planned from communication and the pipeline.",
    )
    add("--price", range=above(0, 10**9), metavar="USD", help="per device-hour. Default: the table's range.")
    add(
        "--mtbf_hours", range=above(0, 10**9), metavar="H", help="between failures of the whole run. Default: 50,000 / devices."
    )
    add("--save_gbps", range=above(0, 10**9), metavar="GB/s", help=f"checkpoints, by each machine. Default: {SAVE_GBPS}.")
    add("--storage_gbps", range=above(0, 10**9), metavar="GB/s", help="checkpoints, by all machines. Default: no limit.")
    add(
        "--serve_tokens",
        range=above(0, 10**24),
        metavar="T",
        help="tokens that the model will generate in use: adds the lifetime cost.",
    )
    add("--flops", range=above(0, 10**40), metavar="C", help="a budget: its compute-optimal model, and half and twice that. "
        "Without a recipe, nothing else.")  # fmt: skip
    add("--days", range=above(0, 10**6), metavar="D", help="as --flops, for all devices in so many days.")
    add("--at", range=whole(1, STEPS), metavar="STEP", help="also the exact learning rates of this optimizer step.")
    add(
        "--slowest_rank",
        range=at_least(1, 10**6),
        default=1.0,
        metavar="F",
        help="step time of the slowest rank, divided by the mean.",
    )
    add("--sweep", nargs="+", metavar="KEY=A,B", help=f"compare combinations; keys: {', '.join(sweep.KEYS)}.")
    add("--max_memory", range=above(0, 10**9), metavar="GB", help="per rank: choose the cheapest combination that needs less.")
    add("--deadline", range=above(0, 10**9), metavar="H", help="hours: choose the cheapest combination that finishes by then.")
    add("--from_run", metavar="DIR", help="plan the recipe of this run folder, with the speed that it measured.")
    add("--from_certificate", metavar="FILE", help="plan with the speeds that `certify` measured on its machine.")
    add("--json", type=bool, help="all figures, raw, units in their names.")
    add("--markdown", type=bool, help="the page as Markdown.")
    add("--header", type=bool, help="the lines that begin a recipe's file, with the smallest hardware on which it fits.")
    add("--html", metavar="FILE", help="also write a page with pictures of memory, time, and pipeline or sweep.")
    add("--replace", type=bool, help=REPLACE_HELP)
    return parser


def main(words: list[str]) -> int:
    """Print the plan of a run; return 1 if the run does not fit the devices, or no combination meets the limits, else 0."""
    flags = own_flags()
    if {"--help", "-h"} & set(words):
        flags.print_help()
        return 0
    own, recipe = flags.split(words)
    if own.flops is not None and own.days is not None:
        flags.problems.append("--days and --flops both are a budget: give one of them (--flops)")
    source = _source(own)
    if own.from_run is not None and source is not None:
        # the words that name the run's recipe, without its folder: nothing is resumed
        tokenizer = [f"--{flag.key}={flag.value}" for flag in own_tokenizer(source.run)]
        recipe = ["--config", str(source.run / CONFIG), *tokenizer, *recipe]
    if not recipe and (own.flops is not None or own.days is not None):
        refuse(flags.problems)
        return _without_recipe(own, flags)
    with without_garbage_collection():  # imported modules stay: searching them again takes a fifth of the start
        return launch("fit", recipe, lambda arguments: _run(own, arguments, source), own=flags)


def _source(own: argparse.Namespace) -> MeasuredRun | None:
    """Return the run or certificate whose speed the plan uses, or None without a flag. A certificate sets `own.save_gbps`."""
    given = [flag for flag in ("from_certificate", "from_run", "mfu") if getattr(own, flag) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[1]} and --{given[0]} both decide the speed; give one of them (--{given[0]})")
    if given == ["from_certificate"]:
        source, gbps = certified_run(Path(own.from_certificate))
        own.save_gbps = own.save_gbps or gbps
        return source
    return measured_run(expanded(own.from_run, key="from_run", flag="--from_run")) if given == ["from_run"] else None


WITHOUT_RECIPE = ["command", "flops", "days", "devices", "hardware", "mfu", "scaling_efficiency", "price", "json", "markdown"]
"""The flags that `plan` takes without a recipe, if `--flops` or `--days` gives a budget."""


NO_SPEED = "--days needs hardware whose dense peak is known (--hardware h100-sxm), or give --flops"


def _without_recipe(own: argparse.Namespace, flags: OwnFlags) -> int:
    """Print the compute-optimal models of a budget in FLOPs or days, without a recipe; return the exit code 0."""
    others = [name for name, value in vars(own).items() if name not in WITHOUT_RECIPE and value != flags.get_default(name)]
    refuse([f"--{name} needs a recipe (--config)" for name in others])
    hardware = None if own.hardware is None else _hardware(own.hardware)
    of_hardware = [name for name in ("devices", "mfu", "scaling_efficiency", "price") if getattr(own, name) is not None]
    if own.flops is not None and hardware is None:
        refuse(f"--{name} needs --hardware, or leave it out" for name in of_hardware)
    figures = budget(_options(own), hardware, own.devices or 1)
    if figures is None:
        raise UserError(NO_SPEED)
    _show(figures, own)
    return 0


def _hardware(name: str | None) -> Hardware:
    """Return the hardware that `--hardware` names. None: this machine. "auto": this machine, with its speed measured now."""
    return this_machine(measure=name == "auto") if name in (None, "auto") else find(name)


def _options(own: argparse.Namespace, measured: MeasuredRun | None = None) -> Options:
    """Return the assumptions of the plan that the flags set. `measured`: a measured run or certificate for the speed."""
    given = {each.name: getattr(own, each.name) for each in fields(Options) if getattr(own, each.name, None) is not None}
    return Options(**given, price_usd_hour=own.price, served_tokens=own.serve_tokens, measured=measured)


def _show(shown: Plan | dict[str, Any], own: argparse.Namespace) -> None:
    from rich.console import Console

    from lit_llm.reporting.plan_text import markdown, render

    if own.json:
        print(json.dumps(as_dict(shown) if isinstance(shown, Plan) else shown, indent=2))
    elif own.markdown:
        print(markdown(shown), end="")
    else:
        console = Console(file=sys.stdout)
        console.print(render(shown, width=console.width))


def _run(own: argparse.Namespace, arguments: Arguments, source: MeasuredRun | None) -> int:
    from lit_llm.distributed.layout import layout_of
    from lit_llm.plan.planned_recipe import build_to_plan, planned_run
    from lit_llm.training.auto_precision import choose_for

    problems: list[str] = []
    hardware: Hardware | None = None
    speed, devices = None, own.devices
    if source is not None:
        speed = with_slowness(source)
        if devices is None and arguments.value_of("trainer.devices") in (None, "auto", -1, "-1"):
            devices = source.settings.layout.devices
    with noting(problems):
        is_of_run = source is not None and own.hardware in (None, source.hardware.name)
        hardware = source.hardware if source is not None and is_of_run else _hardware(own.hardware)
    axes: dict[str, list[str]] = {}
    with noting(problems):
        axes = sweep.parse(own.sweep or [])
    limits = [f"--{name}" for name in ("max_memory", "deadline") if getattr(own, name) is not None]
    alone = [f"--{name}" for name in ("header", "flops", "days", "at") if getattr(own, name)]
    if alone and (own.sweep or limits):
        problems.append(f"{alone[0]} is for one plan: leave out {alone[0]} or {' and '.join(limits) or '--sweep'}.")
    with noting(problems):
        nodes = 1 if hardware is None else hardware.devices_per_node
        elsewhere = None if hardware is None or own.hardware in (None, "auto") else choose_for(hardware)
        built = build_to_plan(arguments, devices=devices, devices_per_node=nodes, precision=elsewhere)
    refuse(problems)
    assert hardware is not None
    settings, notes = planned_run(built)
    options, compared = _options(own, speed), axes or (sweep.DEFAULT if limits else {})
    if own.devices is not None and "devices" in compared:
        by = "--sweep" if axes else " and ".join(limits)
        notes.append(f"--devices {own.devices} is overridden by {by}: comparing {', '.join(compared['devices'])} devices")
    elif own.devices is not None and (nodes := built.config.trainer.num_nodes or 1) > 1:
        in_each = hardware.devices_per_node
        where = f"{counted(math.ceil(own.devices / in_each), 'machine')}: {hardware.name} has {in_each} in each"
        why = f"--devices counts all, --trainer.num_nodes {nodes} is not read"
        notes.append(f"{own.devices:,} devices in all, on {where} ({why})")
    strategy = arguments.value_of("trainer.strategy")
    if limits and not axes and strategy not in (None, "auto"):
        name, by, instead = str(strategy).rpartition(".")[2], " and ".join(limits), ", ".join(compared["strategy"])
        notes.append(f"trainer.strategy {name} is overridden by {by}: comparing {instead} (--sweep strategy=…)")
    if speed is not None and (changed := differences(speed.settings, settings)):
        notes.append(f"the speed of {speed.run} was measured with other settings: {', '.join(changed)}")
    if "float8" in axes.get("precision", []) or built.config.compute.float8:
        saves = "only the time of products" if hardware.peak_tflops["fp8"] else f"nothing: {hardware.name} has no peak for it"
        notes.append(f"float8 is planned without saving memory or communication. It saves {saves}.")
    swept = [table()[name] for name in axes.get("hardware", []) if name in table()]
    notes += [speed.sentence(each) for each in swept if speed is not None and not speed.holds_for(each)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if compared:
        return _compare(compared, settings, partial(layout_of, built.strategy or "auto"), hardware, options, own)
    plan = make_plan(settings, hardware, options)
    if own.days is not None and plan.budget is None:
        raise UserError(NO_SPEED)
    if own.html is not None:
        from lit_llm.reporting.plan_page import plan_page

        write_new(Path(own.html), plan_page(plan, own.command), replace=own.replace, flag="--html")
    if own.header and not own.json:
        from lit_llm.reporting.recipe_header import header

        print(header(plan, own.command), end="")
    else:
        _show(plan, own)
    return int(plan.fits is False)


def _compare(
    axes: dict[str, list[str]],
    settings: PlannedRun,
    layout: sweep.LayoutOf,
    hardware: Hardware,
    options: Options,
    own: argparse.Namespace,
) -> int:
    from lit_llm.reporting.plan_text import SWEEP, summary, sweep_row, table_rows

    variants, many, said = list[sweep.Variant](), math.prod(map(len, axes.values())), time.monotonic()
    for variant in sweep.variants(axes, settings, layout, hardware, options):
        variants.append(variant)
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"planned {len(variants)} of {many} combinations", file=sys.stderr)
    limited = own.max_memory is not None or own.deadline is not None
    best = sweep.cheapest(variants, max_memory_gb=own.max_memory, deadline_hours=own.deadline) if limited else None
    if own.html is not None:
        from lit_llm.reporting.plan_sweep_page import sweep_page

        write_new(Path(own.html), sweep_page(variants, best, own.command), replace=own.replace, flag="--html")
    shown = variants if own.sweep else [v for v in variants if v is best]  # without --sweep, only the chosen one is of interest
    if own.json:
        raw = [{"values": v.values, "problem": v.problem or None, "plan": as_dict(v.plan) if v.plan else None} for v in shown]
        print(json.dumps({"variants": raw, "cheapest": best.values if best else None}, indent=2))
    else:
        if shown:
            print(table_rows([*axes, *SWEEP], [sweep_row(v) for v in shown], as_markdown=own.markdown), end="")
        for problem in dict.fromkeys(v.problem for v in shown if v.problem):
            print(f"no plan: {problem}")
        if best is not None:
            print(f"cheapest that fits: {_combination(best)}")
    if best is not None or (not limited and sweep.fitting(variants, None)):
        return 0
    print("no combination fits the devices and the limits (--max_memory, --deadline, --sweep)", file=sys.stderr)
    nearest = sweep.nearest(variants, own.max_memory)
    if nearest is not None and (plan := nearest.plan) is not None:
        print(f"nearest: {_combination(nearest)}", file=sys.stderr)
        print(*(f" {name:7} {said}" for name, said in summary(plan)[:2]), sep="\n", file=sys.stderr)
        more = max(v.plan.settings.layout.devices for v in variants if v.plan is not None) * 2
        helps = f"to mend it: more devices (--sweep devices={more}), other hardware"
        if nearest not in sweep.fitting(variants, own.max_memory):
            print(f"{helps} or a higher --max_memory", file=sys.stderr)
        elif plan.run_seconds is not None:
            print(f"{helps}, fewer tokens (--trainer.max_steps) or a later --deadline", file=sys.stderr)
    return 1


def _combination(variant: sweep.Variant) -> str:
    return " ".join(f"{key}={value}" for key, value in variant.values.items())
