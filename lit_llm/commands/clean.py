"""`python -m lit_llm clean`: normalise and filter documents, and remove duplicates."""

from __future__ import annotations

from pathlib import Path

from lit_llm.clean.clean_pipeline import clean
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.datatrove_script import datatrove_script
from lit_llm.clean.removal_report import REMOVED, table
from lit_llm.clean.steps import step_problems
from lit_llm.commands.new_output import REPLACE_HELP, log_beside, new_file_if, new_folder
from lit_llm.commands.own_flags import OwnFlags, add_field_flags, settings_from
from lit_llm.core.disk import write_text
from lit_llm.core.errors import refuse, report
from lit_llm.core.number_domain import whole
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.paths import list_sources
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.token_parts import PARTS
from lit_llm.runs.run_folder import expanded


def main(words: list[str]) -> int:
    """Write the folder."""
    flags = OwnFlags("clean", alone=True, description=__doc__)
    flags.add_argument("--out", required=True, help="empty or new folder for the documents and the report")
    flags.add_argument(
        "--workers", range=whole(1, 4096), default=1, help="processes; the documents are the same for any number"
    )
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    add_field_flags(flags, CleanSettings)
    own = flags.parse(words)
    settings = settings_from(CleanSettings, own)
    refuse(settings.problems() + step_problems(settings))
    sources, problems = list_sources(list(settings.paths), flag="--data.paths")
    refuse(problems)
    inputs = [Input(source, "train", settings.read_settings()) for source in sources]
    out = expanded(own.out, key="out", flag="--out")
    above = [folder for pattern in settings.paths if (folder := Path(pattern).expanduser()).is_dir()]
    read = [Path(one.source.path) for one in inputs if one.source.is_local]
    named, threshold = settings.emit_datatrove, settings.near_duplicates
    script = None if named is None or threshold is None else expanded(named, key="emit_datatrove", flag="--emit_datatrove")
    with (
        new_file_if(script, replace=own.replace, flag="--emit_datatrove") as script_file,
        new_folder(out, replace=own.replace, sources=read, above=above, resumable=PARTS) as partial,
    ):
        if not any(getattr(settings, step) for step in settings.steps()):
            flags_of_steps = ", ".join(f"--{step}" for step in settings.steps())
            report(f"No step is on, so every document is copied as it is: switch one on ({flags_of_steps}).", "note")
        tally = clean(inputs, settings, partial, workers=own.workers, progress=ProgressLog(log_beside(out)))
        if script_file is not None and threshold is not None:
            ngram, permutations = settings.near_ngram, settings.near_permutations
            write_text(script_file, datatrove_script(out, threshold=threshold, ngram=ngram, permutations=permutations))
    print("\n".join(table(tally)))
    if settings.emit_datatrove is not None:
        print(f"near-duplicates: python {settings.emit_datatrove} --tasks {len(list(out.glob('part-*')))}")
    if tally.samples:
        print(f"samples of what was removed: {out / REMOVED}")
    return 0
