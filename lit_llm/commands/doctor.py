"""`python -m lit_llm doctor`: what is wrong with a run, the likely cause, and what to change."""

from __future__ import annotations

from lit_llm.commands.new_output import REPLACE_HELP, write_new
from lit_llm.commands.own_flags import OwnFlags


def main(arguments: list[str]) -> int:
    """Print the faults found in a run; return the exit code: 2 without a curve to read, 1 for an error or a warning, else 0."""
    flags = OwnFlags("doctor", alone=True, description=__doc__)
    flags.add_argument(
        "--run", required=True, help="run folder, like runs/quickstart; also of another project that logs with these callbacks"
    )
    flags.add_argument(
        "--check_data",
        type=bool,
        default=None,
        help="compare the shards of the training data with their hashes; by default if they have at most 2 GB",
    )
    flags.add_argument(
        "--report", help="write rows and settings, without text and paths, to this file, so that you can send it"
    )
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    own = flags.parse(arguments)
    from lit_llm.core.number_text import counted
    from lit_llm.reporting.doctor.case_file import case_text
    from lit_llm.reporting.doctor.diagnose import RULES, examine, read_run
    from lit_llm.reporting.doctor.finding import Severity
    from lit_llm.runs.run_folder import expanded

    run, notes = read_run(expanded(own.run), check_data=own.check_data)
    findings, unjudged = examine(run)
    for note in notes:
        print(f"note: {note}")
    for finding in findings:
        print("\n".join(finding.lines()))
    if own.report is not None:
        text = case_text(run, [finding.name for finding in findings])
        write_new(expanded(own.report, key="report", flag="--report"), text, replace=own.replace, flag="--report")
    if not findings and not run.is_readable:
        print(f"Nothing to judge: {own.run} has no curve that a rule reads.")
        return 2
    for curve, names in sorted(unjudged.items()):
        print(f"not judged, for too few rows of {curve}: {', '.join(names)}")
    judged = f"{len(RULES) - sum(map(len, unjudged.values()))} of {len(RULES)} rules"
    if findings:
        print(f"{counted(len(findings), 'finding')} by {judged}: {own.run}, {counted(run.step, 'step')}.")
    else:
        print(f"No finding by {judged}: {own.run}, {counted(run.step, 'step')}.")
    return 1 if any(finding.rule.severity is not Severity.ADVICE for finding in findings) else 0
