"""`python -m lit_llm report`: one HTML file about one run, or several runs compared."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_llm.commands.new_output import REPLACE_HELP, write_new
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError
from lit_llm.core.number_text import counted
from lit_llm.runs.curve import TOLERANCE

if TYPE_CHECKING:
    from lit_llm.reporting.comparison_page import Ranking


def main(arguments: list[str]) -> int:
    """Write the file, and print the ranking of several runs."""
    flags = OwnFlags("report", alone=True, description=__doc__)
    flags.add_argument("--run", action="append", help="run folder, like runs/quickstart; several are compared")
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
    several = own.compare or own.run[1:]
    if several and (own.check_against is not None or own.check_tolerance is not None):
        raise UserError("check_against compares one run with a curve, but several are given (--run)")
    if own.check_against is None and own.check_tolerance is not None:
        raise UserError("check_tolerance has no effect without a curve (--check_against)")
    for line in _compare(own) if several else _report(own):
        print(line)
    print(f"Wrote {own.out}. Open it in a browser.")
    return 0


def _report(own: Namespace) -> Iterator[str]:
    """Write the page of a run, and say what it does not have."""
    from lit_llm.reporting.evidence import Evidence, shipped_evidence
    from lit_llm.reporting.report_page import missing, report_page
    from lit_llm.reporting.run_curves import RunCurves, named
    from lit_llm.reporting.sweep_runs import named_run
    from lit_llm.runs.curve_follower import CurveFollower

    loaded = named_run(own.run[0])
    run = RunCurves(loaded, *named([loaded.path]))
    if own.check_against is not None:
        tolerance = TOLERANCE if own.check_tolerance is None else own.check_tolerance
        recorded: Evidence | None = Evidence(CurveFollower.of_file(own.check_against, tolerance), "")
    else:
        recorded = shipped_evidence(loaded.config)
    write_new(own.out, report_page(run, own.command, recorded), replace=own.replace)
    yield from (f"note: {sentence}" for sentence in missing(run))


def _compare(own: Namespace) -> Iterator[str]:
    """Write the page of several runs, and say the ranking and the most important notes."""
    from lit_llm.reporting.comparison_page import MOST_NOTES, comparison_page, notes, rankings
    from lit_llm.reporting.run_curves import RunCurves, named
    from lit_llm.reporting.sweep_runs import named_run, sweep_runs

    for run in own.run or ():
        named_run(run)
    loaded, left_out = sweep_runs(own.compare or own.run)
    names = named([run.path for run in loaded])
    found = rankings([RunCurves(run, name) for run, name in zip(loaded, names, strict=True)])
    said = notes(found, left_out)
    write_new(own.out, comparison_page(found, own.command, said), replace=own.replace)
    for ranking in found:
        if ranking.condition:
            yield f"{ranking.condition}:"
        yield from _places(ranking)
    yield from (f"note: {sentence}" for sentence in said[:MOST_NOTES])
    if len(said) > MOST_NOTES:
        yield f"{counted(len(said) - MOST_NOTES, 'more note')} in the page."


def _places(ranking: Ranking) -> Iterator[str]:
    """Each setting with its value and the step of that value. A run that nothing is compared with has no number."""
    for i, place in enumerate(ranking.places, 1):
        run = place.runs[0]
        if place.value is None:
            yield f"–. {place.name}: no finite {ranking.tag or 'loss'} after step {run.step:,}"
        else:
            number = f"{i}." if len(ranking.places) > 1 else "–."
            yield f"{number} {place.name}: {ranking.tag} {place.said()} after step {run.series(ranking.tag or '').steps[-1]:,}"
