"""`python -m lit_llm doctor`: what is wrong with a run, the likely cause, and what to change."""

from __future__ import annotations

from lit_llm.commands.own_flags import OwnFlags


def main(arguments: list[str]) -> int:
    """Print the findings. Returns 1 if there is an error or a warning, 0 if there is at most advice."""
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
    own = flags.parse(arguments)
    from lit_llm.reporting.doctor.diagnose import RULES, diagnose, read_run
    from lit_llm.reporting.doctor.finding import Severity
    from lit_llm.runs.run_folder import expanded

    run, notes = read_run(expanded(own.run), check_data=own.check_data)
    findings = diagnose(run)
    for note in notes:
        print(f"note: {note}")
    for finding in findings:
        print("\n".join(finding.lines()))
    if findings:
        print(f"{len(findings)} of {len(RULES)} rules apply to {own.run}, {run.step:,} steps.")
    else:
        print(f"No finding: none of {len(RULES)} rules applies to {own.run}, {run.step:,} steps.")
    return 1 if any(finding.rule.severity is not Severity.ADVICE for finding in findings) else 0
