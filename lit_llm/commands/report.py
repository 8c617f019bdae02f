"""`python -m lit_llm report`: one HTML page about one run or a comparison of runs; also writes the figures as a CSV."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_llm.commands.new_output import REPLACE_HELP, new_file, write_new
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError
from lit_llm.core.number_text import counted
from lit_llm.runs.curve import TOLERANCE

if TYPE_CHECKING:
    from lit_llm.reporting.comparison_page import Ranking


def main(arguments: list[str]) -> int:
    """Write the HTML page and the CSV that the flags name, print a ranking of several runs, and return the exit code."""
    flags = OwnFlags("report", alone=True, description=__doc__)
    flags.add_argument("--run", action="append", help="run folder, like runs/quickstart; several are compared")
    flags.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        help="instead: run folders, or folders of them, like runs/sweep; any number, as a ranking",
    )
    flags.add_argument("--out", type=Path, help="the HTML file; it needs no other file and no network")
    flags.add_argument("--csv", type=Path, help="the run's curve, for `fit --check_against`; of several runs, a row for each")
    flags.add_argument(
        "--note", action="append", default=[], metavar="NAME=TEXT", help="a line for the head of the CSV: hardware='one H100'"
    )
    flags.add_argument("--check_against", type=Path, help="a recorded curve, such as --csv writes")
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
    if own.out is None and own.csv is None:
        raise UserError("name the file to write: the page (--out), or figures (--csv)")
    if several and own.note:
        raise UserError("note is for the CSV of one run, but several are given (--run)")
    if own.csv is not None and not several:
        _write_curve(own.run[0], own.csv, own.note, replace=own.replace)
    if own.out is not None or several:
        for line in _compare(own) if several else _report(own):
            print(line)
    if own.out is not None:
        print(f"Wrote {own.out}. Open it in a browser.")
    return 0


def _write_curve(name: str, out: Path, notes: list[str], *, replace: bool) -> None:
    """Write the curve of the run `name` as a CSV to `out`. Its head has facts about it, and the user's `notes`, NAME=TEXT."""
    from lit_llm.checkpoint.disk_format import read_manifest
    from lit_llm.runs.curve import versions_text
    from lit_llm.runs.loaded_run import LoadedRun
    from lit_llm.runs.run_folder import config_of, expanded, settings_of
    from lit_llm.runs.saved_run import find_checkpoint

    given = [note.partition("=") for note in notes]
    if wrong := [note for note, (key, equals, _) in zip(notes, given, strict=True) if not (equals and key.isidentifier())]:
        raise UserError(f"note is {wrong[0]!r}, but must be NAME=TEXT (--note)")
    with new_file(out, replace=replace, flag="--csv") as partial:
        run = expanded(name)
        config, curve = settings_of(config_of(run).parent), LoadedRun(run).curve
        if not curve.rows:
            raise UserError(f"{run} has no curves: it was run without a logger (trainer.logger=false), or not at all (--run)")
        curve.facts = {
            "versions": versions_text(read_manifest(find_checkpoint(run, "last"))["versions"]),
            "seed": str(config["seed_everything"]),
            "precision": str(config["trainer"]["precision"] or "32-true"),
            **{key: text for key, _, text in given},
        }
        curve.write(partial)
    print(f"Wrote {len(curve.rows)} rows to {out}. Check a run against it: fit --config RECIPE --check_against {out}")


def _report(own: Namespace) -> Iterator[str]:
    """Write the page of a run, and yield a note for each part that the page cannot show."""
    from lit_llm.reporting.report_page import missing, report_page
    from lit_llm.reporting.run_curves import RunCurves, named
    from lit_llm.reporting.sweep_runs import named_run
    from lit_llm.runs.curve_follower import CurveFollower

    loaded = named_run(own.run[0])
    run = RunCurves(loaded, *named([loaded.path]))
    tolerance = TOLERANCE if own.check_tolerance is None else own.check_tolerance
    recorded = None if own.check_against is None else CurveFollower.of_file(own.check_against, tolerance)
    write_new(own.out, report_page(run, own.command, recorded), replace=own.replace)
    yield from (f"note: {sentence}" for sentence in missing(run))


def _compare(own: Namespace) -> Iterator[str]:
    """Write the page and the CSV of several runs, and yield the lines of the ranking and the most important notes."""
    from lit_llm.reporting.comparison_page import MOST_NOTES, comparison_page, notes, rankings
    from lit_llm.reporting.ranking import csv_rows
    from lit_llm.reporting.run_curves import RunCurves, named
    from lit_llm.reporting.sweep_runs import named_run, sweep_runs

    for run in own.run or ():
        named_run(run)
    loaded, left_out = sweep_runs(own.compare or own.run)
    names = named([run.path for run in loaded])
    curves = [RunCurves(run, name) for run, name in zip(loaded, names, strict=True)]
    comparison = rankings(curves)
    said = notes(comparison, left_out)
    if own.out is not None:
        write_new(own.out, comparison_page(comparison, own.command, said), replace=own.replace)
    if own.csv is not None:
        csv.writer(text := io.StringIO(), lineterminator="\n").writerows(csv_rows(curves))
        write_new(own.csv, text.getvalue(), replace=own.replace, flag="--csv")
    for ranking in comparison:
        if ranking.condition:
            yield f"{ranking.condition}:"
        yield from _places(ranking, of_several=len(comparison) > 1)
    shown = len(said) if own.out is None else MOST_NOTES
    yield from (f"note: {sentence}" for sentence in said[:shown])
    if len(said) > shown:
        yield f"{counted(len(said) - shown, 'more note')} in the page."
    if own.csv is not None:
        yield f"Wrote {counted(len(curves), 'run')} to {own.csv}."


def _places(ranking: Ranking, *, of_several: bool) -> Iterator[str]:
    """Yield a line of text for each entry of a ranking: its place, its name, its value and the step of the value.

    The only entry of a ranking has no place. If there are several rankings (`of_several`), its line says why.
    """
    why = " (no place: no other run has this task, text and tokenizer)" if of_several else ""
    for i, place in enumerate(ranking.places, 1):
        run = place.runs[0]
        if place.value is None:
            yield f"–. {place.name}: no finite {ranking.tag or 'loss'} after step {run.step:,}"
        else:
            number, why = (f"{i}.", "") if len(ranking.places) > 1 else ("–.", why)
            step = run.series(ranking.tag or "").steps[-1]
            yield f"{number} {place.name}: {ranking.tag} {place.said()} after step {step:,}{why}"
