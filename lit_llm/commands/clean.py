"""`python -m lit_llm clean`: normalise and filter documents, and remove duplicates."""

from __future__ import annotations

from pathlib import Path

from lit_llm.clean.clean_pipeline import clean
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.datatrove_pipeline import WORK, executor_problems, run_with_datatrove
from lit_llm.clean.removal_report import REMOVED, table
from lit_llm.clean.steps import step_problems
from lit_llm.commands.new_output import REPLACE_HELP, log_beside, new_folder, refuse_inside
from lit_llm.commands.own_flags import OwnFlags, add_field_flags, parse_settings
from lit_llm.core.errors import refuse, report
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.paths import list_sources
from lit_llm.ingest.progress import ProgressLog
from lit_llm.runs.run_folder import expanded


def main(words: list[str]) -> int:
    """Clean the documents that the command-line `words` name, write them into a folder, and return the exit code."""
    flags = OwnFlags("clean", alone=True, description=__doc__)
    flags.add_argument("--out", required=True, help="empty or new folder for the documents and the report")
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    add_field_flags(flags, CleanSettings)
    own, settings = parse_settings(flags, CleanSettings, words)
    refuse(settings.problems() + (step_problems if settings.executor is None else executor_problems)(settings))
    sources, problems = list_sources(list(settings.paths), flag="--data.paths")
    refuse(problems)
    inputs = [Input(source, "train", settings.read_settings()) for source in sources]
    out = expanded(own.out, key="out", flag="--out")
    above = [folder for pattern in settings.paths if (folder := Path(pattern).expanduser()).is_dir()]
    if settings.executor is not None:
        for folder in above:
            refuse_inside(out, folder, flag="--out")
        run_with_datatrove(inputs, settings, out)
        print(f"documents: {out}/part-*.jsonl; what each task removed: {out / WORK}/logs")
        return 0
    read = [Path(one.source.path) for one in inputs if one.source.is_local]
    with new_folder(out, replace=own.replace, sources=read, above=above) as partial:
        if not any(getattr(settings, step) for step in settings.steps()):
            flags_of_steps = ", ".join(f"--{step}" for step in settings.steps())
            report(f"No step is on, so every document is copied as it is: switch one on ({flags_of_steps}).", "note")
        tally = clean(inputs, settings, partial, progress=ProgressLog(log_beside(out)))
    print("\n".join(table(tally)))
    if tally.samples:
        print(f"samples of what was removed: {out / REMOVED}")
    return 0
