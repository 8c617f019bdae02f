"""Read a run folder, of lit_llm or of any module that logs with lit_llm's callbacks, and apply all rules of `doctor`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_llm.config.arguments import leaves
from lit_llm.core.disk import read_text
from lit_llm.core.errors import UserError
from lit_llm.data.stored_files import hash_of
from lit_llm.ingest.chat import CHAT_TEMPLATE_FILE, ChatTemplate
from lit_llm.ingest.chat.render import Renderer
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.ingest.shards import HEADER_BYTES
from lit_llm.reporting.doctor import (
    data_rules,
    expert_rules,
    loss_rules,
    optimizer_rules,
    preference_rules,
    setting_rules,
    speed_rules,
    validation_rules,
)
from lit_llm.reporting.doctor.case_file import read_case
from lit_llm.reporting.doctor.finding import SURE, Finding, Rule
from lit_llm.reporting.doctor.observed import Observed, Unjudged
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.lock import sign_of_life
from lit_llm.runs.plan_record import recorded_launches
from lit_llm.runs.run_folder import CONFIG

_FILES = (
    data_rules, setting_rules, optimizer_rules, expert_rules, preference_rules, validation_rules, loss_rules, speed_rules,
)  # fmt: skip
RULES = tuple(each for file in _FILES for each in vars(file).values() if isinstance(each, Rule))
"""All rules. Findings that are otherwise equally important are in this order."""


def diagnose(run: Observed) -> list[Finding]:
    """Return the findings about a run. Findings that follow from other findings are last; otherwise the order is by severity,
    the worst first, then by how sure the cause is, the surest first."""
    return examine(run)[0]


def examine(run: Observed) -> tuple[list[Finding], dict[str, list[str]]]:
    """Return (findings in the order of `diagnose`, {missing curve: names of the rules that cannot judge without the curve})."""
    evidence, unjudged = dict[Rule, str](), dict[str, list[str]]()
    for rule in RULES:
        try:
            if (seen := rule.seen(run)) is not None:
                evidence[rule] = seen
        except Unjudged as missing:
            unjudged.setdefault(str(missing), []).append(rule.name)
    causes = {rule: tuple(other.name for other in evidence if rule.name in other.explains) for rule in evidence}
    findings = [Finding(rule, seen, causes[rule]) for rule, seen in evidence.items()]
    findings.sort(key=lambda each: (bool(each.follows_from), each.rule.severity, SURE.index(each.rule.sure)))
    return findings, unjudged


MOST_BYTES = 2 * 10**9
"""By default, training data of up to MOST_BYTES bytes are compared with their hashes, which takes some seconds."""


def read_run(folder: Path, *, check_data: bool | None = None) -> tuple[Observed, list[str]]:
    """Return (the run in `folder`, or in a case file of `doctor --report`; sentences about files that could not be read).

    Args:
        check_data: whether to compare the shards of the training data with their hashes. None: if the shards have at most 2 GB.

    Raises:
        UserError: The folder does not exist, or has neither settings nor logged rows; or the file is no case file.
    """
    if folder.is_file():
        return read_case(folder), []
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder} (--run)")
    loaded = LoadedRun(folder, of_lit_llm=False)
    run, config = observed(loaded), loaded.config
    if not config and not run.scalars:
        raise UserError(f"{folder} is not a run folder: it has neither {CONFIG} nor logged rows (--run)")
    notes = [f"{said}." for said in loaded.unread]
    if said := sign_of_life(folder):
        last = max((series.times[-1] for series in loaded.scalars.values()), default=None)
        row = "" if last is None else f" The newest row is {max(0.0, time.time() - last):,.0f} s old."
        notes.append(f"{said}.{row}")
    elif (launches := recorded_launches(folder)) and launches[-1].get("ended", "") is None:
        notes.append("The last start of `fit` recorded no end: an error or a second Ctrl-C ended it (its output says why).")
    if not config:
        notes.append(f"There is no {CONFIG}: rules about settings are left out.")
    if not run.scalars:
        notes.append("Nothing was logged: the run has not reached its first row, or ran without a logger.")
    elif not run.is_readable:
        notes.append(
            f"No rule reads any of the {len(run.scalars):,} curves, such as {next(iter(run.scalars))} (docs/doctor.md)."
        )
    elif not any(tag.startswith("health/") for tag in run.scalars):
        notes.append("There are no health signals (--health): rules about layers, targets and masks are left out.")
    shards = data_shards(config)
    size = sum(file.stat().st_size for file, _ in shards if file.is_file())
    if check_data is None and size > MOST_BYTES:
        notes.append(f"The {size / 1e9:,.0f} GB of training data were not compared with their hashes (--check_data true).")
        check_data = False
    file_problems = damages(shards) if check_data is not False else []
    return replace(run, damages=file_problems, question=_question(folder / CHAT_TEMPLATE_FILE)), notes


def _question(template: Path) -> tuple[bool, bool] | None:
    """Return `Observed.question` for the file `template`, the copy of the chat template in the run folder. None: the file is
    missing, or the template fails."""
    if not template.is_file():
        return None
    try:
        text = read_text(template)
        return Renderer(ChatTemplate(template.name, text, {}), re.compile("(?!)")).question()
    except UserError:  # transformers is not installed, or the template asks for more than messages
        return None


def observed(run: LoadedRun) -> Observed:
    """Return the rows, settings and launches of a run, for the rules. Its training data are not compared with their hashes."""
    first_steps = [step for launch in recorded_launches(run.path) if isinstance(step := launch.get("first_step"), int)]
    return Observed(run.scalars, run.config, first_steps)


def data_shards(config: dict[str, Any]) -> list[tuple[Path, str]]:
    """Return (path, hash in the manifest) of each token shard in the folders that a run's data settings name."""
    named = [value for key, value in leaves(config) if key.startswith("data.") and "tokenizer" not in key]
    words = {word for value in named for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)}
    shards = []
    for folder in sorted({folder for word in words if (folder := _folder(word)) is not None}):
        try:
            manifest = Manifest.read(folder)
        except UserError:  # `fit` refuses such a folder
            continue
        for split in manifest.splits.values() if manifest is not None else ():
            shards += [(folder / shard.file, shard.blake2b) for shard in split.shards]
    return shards


def _folder(word: str) -> Path | None:
    """Return the path `word` if it is a folder, otherwise its parent folder. None: `word` cannot be a path."""
    try:
        path = Path(word).expanduser()
        return path if path.is_dir() else path.parent
    except (OSError, RuntimeError):  # too long, no permission, an unknown home folder
        return None


def damages(shards: Sequence[tuple[Path, str]]) -> list[str]:
    """Return a sentence for each file that cannot be read or has another hash. `shards`: (file, expected hash) pairs."""
    sentences = []
    for path, expected in shards:
        try:
            with open(path, "rb") as file:
                head = file.read(HEADER_BYTES)
            is_damaged = hash_of(str(path), head) != expected
        except OSError as error:
            sentences.append(f"{path} cannot be read: {error.strerror}")
            continue
        if is_damaged:
            sentences.append(f"{path} does not have the hash that meta.json gives it")
    return sentences
