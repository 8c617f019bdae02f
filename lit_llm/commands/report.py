"""`python -m lit_llm report`: one HTML file about one run, or several runs compared."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lit_llm.commands.new_output import REPLACE_HELP, write_new
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError
from lit_llm.runs.curve import TOLERANCE

if TYPE_CHECKING:
    from lit_llm.reporting.ranking import RankedRun
    from lit_llm.reporting.run_curves import RunCurves
    from lit_llm.runs.loaded_run import LoadedRun


def main(arguments: list[str]) -> int:
    """Write the file, and print the ranking of several runs."""
    flags = OwnFlags("report", alone=True, description=__doc__)
    flags.add_argument("--run", action="append", help="run folder, like runs/quickstart; repeat it to compare up to 8 runs")
    flags.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        help="instead: run folders, or folders of them, like runs/sweep; any number, as a ranking",
    )
    flags.add_argument("--out", required=True, type=Path, help="the HTML file; it needs no other file and no network")
    flags.add_argument("--check_against", type=Path, help="a recorded curve, such as `curve` writes")
    flags.add_argument(
        "--check_tolerance", type=float, help=f"allowed relative difference of its losses; {TOLERANCE} by default"
    )
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    own = flags.parse(arguments)
    if (own.run is None) == (own.compare is None):
        raise UserError("name either runs (--run runs/a) or a folder of runs that are ranked (--compare runs/sweep)")
    if own.compare is not None and (own.check_against is not None or own.check_tolerance is not None):
        raise UserError("check_against compares each run with a curve, a sweep has none (--run instead of --compare)")
    if own.check_against is None and own.check_tolerance is not None:
        raise UserError("check_tolerance has no effect without a curve (--check_against)")
    for line in _compare(own) if own.compare is not None else _report(own):
        print(line)
    print(f"Wrote {own.out}. Open it in a browser.")
    return 0


def _report(own: Namespace) -> Iterator[str]:
    """Write the page of the runs, and say what it does not have."""
    from lit_llm.reporting.evidence import Evidence, shipped_evidence
    from lit_llm.reporting.ranking import ranked
    from lit_llm.reporting.report_page import MOST_RUNS, missing, report_page
    from lit_llm.reporting.sweep_runs import must_be_run
    from lit_llm.runs import load
    from lit_llm.runs.curve_follower import CurveFollower

    if len(own.run) > MOST_RUNS:
        raise UserError(f"{len(own.run)} runs are given, but a page has colours for {MOST_RUNS} (--run, or --compare for more)")
    for run in own.run:
        must_be_run(run)
    loaded = [load(run) for run in own.run]
    twice = [run.path for i, run in enumerate(loaded) if real_path(run.path) in {real_path(each.path) for each in loaded[:i]}]
    if twice:
        raise UserError(f"{twice[0]} is given twice (--run)")
    runs = _named(loaded)
    recorded: list[Evidence | None]
    if own.check_against is not None:
        tolerance = TOLERANCE if own.check_tolerance is None else own.check_tolerance
        recorded = [Evidence(CurveFollower.of_file(own.check_against, tolerance), "")] * len(runs)
    else:
        recorded = [shipped_evidence(run.run.config) for run in runs]
    write_new(own.out, report_page(runs, own.command, recorded), replace=own.replace)
    if len(runs) > 1:
        yield from _places(*ranked(runs))
    for run in runs:
        yield from (f"note: {sentence}" for sentence in missing(run))


def _compare(own: Namespace) -> Iterator[str]:
    """Write the page of the sweep, and say the ranking."""
    from lit_llm.reporting.comparison_page import cautions, comparison_page, in_order, problems
    from lit_llm.reporting.sweep_runs import sweep_runs

    loaded, notes = sweep_runs(own.compare)
    runs = _named(loaded)
    tag, places = in_order(runs)
    write_new(own.out, comparison_page(runs, own.command, notes), replace=own.replace)
    yield from _places(tag, places)
    yield from (f"note: {sentence}" for sentence in [*notes, *cautions(places), *problems(runs, tag)])


def _places(tag: str | None, places: Sequence[RankedRun]) -> Iterator[str]:
    """Each run with its value and the step of that value."""
    for i, (run, value) in enumerate(places, 1):
        if value is None:
            yield f"–. {run.name}: no finite {tag or 'loss'} after step {run.step:,}"
        else:
            yield f"{i}. {run.name}: {tag} {value:.4f} after step {run.series(tag or '').steps[-1]:,}"


def _named(loaded: Sequence[LoadedRun]) -> list[RunCurves]:
    from lit_llm.reporting.run_curves import RunCurves, named

    return [RunCurves(run, name) for run, name in zip(loaded, named([run.path for run in loaded]), strict=True)]
