"""`python -m lit_llm report`: one HTML file about one run, or several runs compared."""

from __future__ import annotations

import shlex
from pathlib import Path

from lit_llm.cli.new_output import REPLACE_HELP, new_file
from lit_llm.cli.own_flags import OwnFlags, true_or_false
from lit_llm.errors import UserError
from lit_llm.runs.curve import TOLERANCE


def main(arguments: list[str]) -> int:
    """Write the file, and print the ranking of several runs.

    Raises:
        UserError: A folder is not a run, there are too many runs, the curve cannot be read, or the file exists.
    """
    flags = OwnFlags(alone=True, prog="python -m lit_llm report", description=__doc__)
    flags.add_argument(
        "--run", action="append", required=True, help="run folder, like runs/quickstart; repeat it to compare runs"
    )
    flags.add_argument("--out", required=True, type=Path, help="the HTML file; it needs no other file and no network")
    flags.add_argument("--check_against", type=Path, help="a recorded curve, such as `curve` writes")
    flags.add_argument(
        "--check_tolerance", type=float, help=f"allowed relative difference of its losses; {TOLERANCE} by default"
    )
    flags.add_argument("--replace", type=true_or_false, default=False, help=REPLACE_HELP)
    own = flags.parse(arguments)
    from lit_llm.disk import write_text
    from lit_llm.report.page import MOST_RUNS, missing, ranked, report_page
    from lit_llm.report.run_curves import RunCurves, named
    from lit_llm.runs import load
    from lit_llm.runs.curve_follower import CurveFollower

    if len(own.run) > MOST_RUNS:
        raise UserError(f"{len(own.run)} runs are given, but a page has colours for {MOST_RUNS} (--run)")
    loaded = [load(run) for run in own.run]
    if len({run.path.resolve() for run in loaded}) < len(loaded):
        raise UserError("a run folder is given twice (--run)")
    runs = [RunCurves(run, name) for run, name in zip(loaded, named([run.path for run in loaded]), strict=True)]
    recorded = None
    if own.check_against is not None:
        tolerance = TOLERANCE if own.check_tolerance is None else own.check_tolerance
        recorded = CurveFollower.of_file(own.check_against, tolerance)
    elif own.check_tolerance is not None:
        raise UserError("check_tolerance has no effect without a curve (--check_against)")
    command = f"python -m lit_llm report {shlex.join(arguments)}"
    with new_file(own.out, replace=own.replace) as partial:
        write_text(partial, report_page(runs, command, recorded))
    if len(runs) > 1:
        tag, places = ranked(runs)
        for i, (run, value) in enumerate(places, 1):
            if value is None:
                print(f"–. {run.name}: no finite {tag or 'loss'} after step {run.step:,}")
            else:
                print(f"{i}. {run.name}: {tag} {value:.4f} after step {run.step:,}")
    for run in runs:
        for sentence in missing(run):
            print(f"note: {sentence}")
    print(f"Wrote {own.out}. Open it in a browser.")
    return 0
