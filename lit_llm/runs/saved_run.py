"""Reads the values in a checkpoint that are not tensors, once per launch, and finds checkpoints in a run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_llm.checkpoint.disk_format import checkpoints_in, read_values
from lit_llm.checkpoint.manifest import intact_manifest
from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import CHECKPOINTS, refuse_hugging_face, run_of
from lit_llm.runs.setting_changes import SETTINGS
from lit_llm.tokenizers import DOCUMENT_IDS_FILE, TOKENIZER_FILE, Tokenizer, load_tokenizer

TOKENIZER_SHA256 = "tokenizer_sha256"
"""Key in a checkpoint: the SHA-256 of the tokenizer's files. Missing if the run has no tokenizer."""
PROMPT_START = "prompt_start"
"""Key in a checkpoint: the list of ids with which prompts start. If empty, prompts start with the tokenizer's BOS, if it has
one. Imported checkpoints lack the key."""


@dataclass(frozen=True)
class SavedRun:
    """Record of a checkpoint: its `path`, and in `values` Lightning's dict, with tensors on the meta device."""

    path: Path
    values: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Read the values of the checkpoint at `path`. If it is a folder, only the manifest's checksum is compared.

        Raises:
            UserError: The checkpoint is missing or in another format, or its manifest or checkpoint.pt is damaged.
        """
        return cls(path, read_values(path))

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint was saved; 0 if the checkpoint has no `global_step`."""
        return int(self.values.get("global_step", 0))

    @property
    def reason_of_end(self) -> str | None:
        """Why EarlyStopping ended the run: its message in the checkpoint, if its patience was used up; otherwise None."""
        states = [state for state in self.values.get("callbacks", {}).values() if isinstance(state, Mapping)]
        for state in states:
            waited, patience = state.get("wait_count"), state.get("patience")
            if state.get("stopping_reason_message") and type(waited) is int and type(patience) is int and waited >= patience:
                return f"early stopping: {state['stopping_reason_message']}"
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run by key; empty if the checkpoint stores none."""
        settings: Mapping[str, Any] = self.values.get(SETTINGS, {})
        return settings

    @property
    def prompt_start(self) -> list[int]:
        """The ids with which prompts start. If empty, prompts start with BOS, if the tokenizer has one."""
        return list(self.values.get(PROMPT_START, []))

    def tokenizer_problem(self, run: Path | None = None) -> str | None:
        """A sentence if a run folder has another tokenizer than the checkpoint; else None, also if either has no tokenizer.

        Args:
            run: the run folder; None: the folder that holds the checkpoint.
        """
        run = run_of(self.path) if run is None else run
        file, expected = run / TOKENIZER_FILE, self.values.get(TOKENIZER_SHA256)
        if expected is None or not file.is_file() or tokenizer_sha256(run) == expected:
            return None
        return (
            f"{file} is not the file with which {real_path(self.path).name} was trained, or {DOCUMENT_IDS_FILE} beside it was "
            "changed, so ids would mean other text: restore both"
        )

    def require_tokenizer(self, run: Path) -> None:
        """Raise a UserError if the run folder `run` has another tokenizer than the checkpoint."""
        if problem := self.tokenizer_problem(run):
            raise UserError(f"{problem} (--run)")

    def tokenizer(self, run: Path) -> Tokenizer | None:
        """The tokenizer in a run folder; None if the data of the run had none.

        Raises:
            UserError: The tokenizer is lost, damaged, or another one than the checkpoint's.
        """
        self.require_tokenizer(run)
        return load_tokenizer(run) if TOKENIZER_SHA256 in self.values or (run / TOKENIZER_FILE).is_file() else None


def no_tokenizer(run: Path) -> UserError:
    """The error, for the caller to raise, that a run without a tokenizer cannot read a prompt."""
    mend = f"give your data module the attribute `tokenizer`, or put a {TOKENIZER_FILE} into the folder"
    return UserError(f"the run {run} has no tokenizer: {mend} (--run)")


def tokenizer_sha256(run: Path) -> str:
    """SHA-256, in hex, of the bytes of a folder's tokenizer.json, followed by those of its document_ids.json, if it has one."""
    content = hashlib.sha256((run / TOKENIZER_FILE).read_bytes())
    if (run / DOCUMENT_IDS_FILE).is_file():
        content.update((run / DOCUMENT_IDS_FILE).read_bytes())
    return content.hexdigest()


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """The checkpoint named `which` (last, best, stable) in a run folder.

    Raises:
        UserError: That checkpoint does not exist. The message lists the existing checkpoints.
    """
    path = run_dir / CHECKPOINTS / f"{which}.ckpt"
    if path.is_symlink() and path.exists():
        return path
    saved = checkpoints_in(run_dir / CHECKPOINTS)  # a copy may lack the links
    newest = next((each for each in saved if each.is_file() or intact_manifest(each) is not None), None)
    if newest is not None and which == "last":
        return newest
    if path.exists():  # a copy may have a folder instead of a link
        return path
    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir} (--run_dir or --run)")
    refuse_hugging_face(run_dir)
    names = sorted(p.name for p in (run_dir / CHECKPOINTS).glob("*.ckpt"))
    hint = f"there are {', '.join(names)}" if names else "there is no checkpoint yet; train first with `fit`"
    raise UserError(f"run folder {run_dir} has no checkpoint '{which}': {hint} (--ckpt_path)")


def named_checkpoint(run_dir: Path, ckpt_path: str) -> Path:
    """The checkpoint that `--ckpt_path` names: "last" or "best" of a run folder, or the path of any checkpoint.

    Raises:
        UserError: The checkpoint does not exist.
    """
    if ckpt_path in ("last", "best"):
        return find_checkpoint(run_dir, ckpt_path)
    if not Path(ckpt_path).exists():
        raise UserError(f"there is no checkpoint {ckpt_path}; give last, best, or a file (--ckpt_path)")
    return Path(ckpt_path)
