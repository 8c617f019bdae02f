"""Folders that `save_to_disk` of Hugging Face datasets writes."""

from __future__ import annotations

from pathlib import Path

from lit_llm.core.disk import read_json, read_object
from lit_llm.core.errors import UserError

_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
DATASET_MARKS = frozenset({_SPLITS_FILE, _STATE_FILE})
"""Names of files that show that a folder may be such a dataset."""
_AGAIN = ": copy or save the dataset again."


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a dataset that `Dataset.save_to_disk` wrote, in order; None if the folder is something else.

    Raises:
        UserError: The folder has several splits, lacks files, or its rows are to be read in another order.
    """
    if (folder / _SPLITS_FILE).is_file():
        raise _several_splits(folder)
    if not (folder / _STATE_FILE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        state = read_json(folder / _STATE_FILE)
    except ValueError as error:
        raise UserError(f"{folder / _STATE_FILE} is damaged, {error}{_AGAIN}") from None
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        return None  # another program's state.json
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is a dataset with an indices mapping: call flatten_indices() before save_to_disk().")
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, but {folder / _STATE_FILE} lists it: copy or save the dataset again.")
    return files


def _several_splits(folder: Path) -> UserError:
    named = read_object(folder / _SPLITS_FILE, mend=_AGAIN).get("splits")
    splits = [split for split in named if isinstance(split, str)] if isinstance(named, list) else []
    held_out = next((split for split in ("validation", "valid", "val", "dev", "test") if split in splits), None)
    train = "train" if "train" in splits else next((split for split in splits if split != held_out), "SPLIT")
    use = f"--data.train {folder / train}" + (f" --data.val {folder / held_out}" if held_out else "")
    return UserError(f"{folder} is a dataset with the splits {', '.join(splits)}: name them with {use}.")
