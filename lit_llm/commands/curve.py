"""`python -m lit_llm curve`: write the curve of a run as a CSV, to check other runs against."""

from __future__ import annotations

from pathlib import Path

from lit_llm.commands.new_output import REPLACE_HELP, new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError


def main(arguments: list[str]) -> int:
    """Write the file."""
    flags = OwnFlags("curve", alone=True, description=__doc__)
    flags.add_argument("--run", required=True, help="run folder, like runs/quickstart")
    flags.add_argument("--out", required=True, type=Path, help="the CSV; `fit --check_against` reads it")
    flags.add_argument(
        "--note",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="a line for the head of the CSV, like hardware='one H100'",
    )
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    own = flags.parse(arguments)
    notes = {}
    for note in own.note:
        name, equals, text = note.partition("=")
        if not equals or not name.isidentifier() or "\n" in note:
            raise UserError(f"note is {note!r}, but must be NAME=TEXT (--note)")
        notes[name] = text
    from lit_llm.checkpoint.disk_format import read_manifest
    from lit_llm.runs.curve import versions_text
    from lit_llm.runs.loaded_run import LoadedRun
    from lit_llm.runs.run_folder import config_of, expanded, settings_of
    from lit_llm.runs.saved_run import find_checkpoint

    with new_file(own.out, replace=own.replace) as partial:
        run = expanded(own.run)
        config, curve = settings_of(config_of(run).parent), LoadedRun(run).curve
        if not curve.rows:
            raise UserError(f"{run} has no curves: it was run without a logger (trainer.logger=false), or not at all (--run)")
        curve.facts = {
            "versions": versions_text(read_manifest(find_checkpoint(run, "last"))["versions"]),
            "seed": str(config["seed_everything"]),
            "precision": str(config["trainer"]["precision"] or "32-true"),
            **notes,  # such as hardware and command, which the folder does not record
        }
        curve.write(partial)
    print(f"Wrote {len(curve.rows)} rows to {own.out}. Check a run against it: fit --config RECIPE --check_against {own.out}")
    return 0
