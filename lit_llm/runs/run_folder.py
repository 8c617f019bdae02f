"""A run folder, `runs/<name>/`: config.yaml, tokenizer.json, curves, checkpoints/ and, during `fit`, lock.json.

This module names the files of the folder and has rules for its path. `lit_llm.runs.resume` decides where a run starts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_json
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, read_yaml_file

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
"""Name of the file of metrics that `callbacks.MetricsFile` writes."""
CSV_METRICS = "metrics.csv"
"""Name of the file of metrics that Lightning's CSVLogger writes."""
LOGGER_RUNS = "logger_runs.json"
"""JSON file: class of a logger → the id of this run in the logger's service (W&B, MLflow)."""
LOGGER_RUN_ARGUMENTS = {"WandbLogger": "id", "MLFlowLogger": "run_id"}
"""Class of a logger whose `version` is the id of the run in its service → the argument of the class that takes this id."""
ENDED = "ended.json"
"""JSON file with the step and the reason, if a run ended before its last step, by early stopping or a time limit."""


def expanded(run_dir: str | Path, *, key: str = "run_dir", flag: str = "--run_dir, or --run") -> Path:
    """The path of a run folder, with `~`, `$NAME` and `${NAME}` in the user's text replaced. `key`, `flag`: names for errors.

    No other code expands the path, except Lightning's TensorBoardLogger, for its event files.

    Raises:
        UserError: The path is empty, or names an environment variable that is not set.
    """
    text = str(run_dir)
    for _ in range(5):  # the value of a variable may name another one
        text = os.path.expandvars(text)
    text = os.path.expanduser(text)
    unset = re.search(r"\$(\w+|\{[^}]*\})", text)
    if unset is not None:
        raise UserError(f"{key} is {run_dir}, but the environment variable {unset[1].strip('{}')} is not set ({flag})")
    if not text.strip():
        raise UserError(f"{key} is empty, but must name a folder ({flag})")
    path = Path(text)
    return path.absolute() if str(path).startswith("~") else path  # Path drops the "./" of "./~name"


def default_run_dir(config_files: list[str]) -> Path:
    """The default run folder: `runs/<name of the first recipe>`, as later recipes (overlays) do not rename a run. If
    `config_files`, the recipes, is empty: `runs/default`."""
    if not config_files:
        return Path("runs") / "default"
    recipe = Path(config_files[0])
    # A recipe can be given by its name alone, and `gpt2-1.5b` has no suffix.
    return Path("runs") / (recipe.stem if recipe.suffix in (".yaml", ".yml", ".json") else recipe.name)


def branch_run_dir(config_files: list[str], checkpoint: Path) -> Path:
    """The default run folder of a run that starts from a checkpoint.

    With overlays (recipes after the first), it is `runs/<run of the checkpoint>-<overlay>-…`. With one recipe, it is the
    recipe's default folder: if the checkpoint is in that folder, the run continues there.
    """
    plain = default_run_dir(config_files)
    if len(config_files) < 2:
        return plain
    folder = checkpoint.absolute().parent
    name = folder.parent.name if folder.name == CHECKPOINTS else plain.name
    return plain.with_name("-".join([name, *(Path(file).stem for file in config_files[1:])]))


def holds_run(run_dir: Path) -> bool:
    """Whether the folder has a config.yaml or checkpoints, so that a run has written into it."""
    return (run_dir / CONFIG).exists() or (run_dir / CHECKPOINTS).exists()


def run_of(checkpoint: Path) -> Path:
    """The run folder that holds a checkpoint."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def refuse_hugging_face(folder: Path, flag: str = "--run") -> None:
    """If `folder`, which the user named by `flag`, is a Hugging Face folder, raise a UserError that says how to import it."""
    if (folder / "config.json").is_file():
        make = f"make a run folder of it first: python -m lit_llm import --from {folder} --out RUN"
        raise UserError(f"{folder} is a Hugging Face folder; {make} ({flag})")


def config_of(run: Path) -> Path:
    """The path of config.yaml in a run folder, which `--run` names.

    Raises:
        UserError: The folder has no config.yaml.
    """
    refuse_hugging_face(run)
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG} (--run)")
    return run / CONFIG


def origin_of(run_dir: Path) -> Path | None:
    """The checkpoint of another run from which the run in `run_dir` branched off, read from config.yaml; None for no branch.

    Raises:
        UserError: config.yaml is not valid YAML.
    """
    if not (run_dir / CONFIG).is_file():
        return None
    origin = settings_of(run_dir).get("resume")
    if origin is not None and not isinstance(origin, str):
        raise UserError(f"resume in {run_dir / CONFIG} is {origin!r}, but must be a path: restore the file (--run_dir)")
    return None if origin is None else Path(origin)


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The settings in the config.yaml of a run folder, as nested dicts.

    Raises:
        UserError: The file is not valid YAML, or has no settings.
    """
    try:
        settings = read_yaml_file(run_dir / CONFIG)
    except InvalidYaml as error:
        raise UserError(f"{run_dir / CONFIG} {error}: restore it, or use another folder (--run_dir)") from None
    if not isinstance(settings, dict):
        raise UserError(f"{run_dir / CONFIG} has no settings: restore it, or use another folder (--run_dir)")
    return settings


def reason_of_end(run_dir: Path, step: int | None) -> str | None:
    """Why the run ended before its last step, from ended.json in the run folder. None if it did not end early at `step`."""
    try:
        end = read_json(run_dir / ENDED)
        return str(end["reason"]) if end["step"] == step else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
