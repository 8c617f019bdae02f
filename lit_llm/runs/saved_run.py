"""What a checkpoint says of its run, beside its tensors: read once in a launch, and handed on to everything that asks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_llm.checkpoint.disk_format import checkpoints_in, read_values
from lit_llm.checkpoint.manifest import intact_manifest
from lit_llm.core.disk import read_ordinary, real_path
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import CHECKPOINTS, run_of
from lit_llm.runs.setting_changes import SETTINGS
from lit_llm.tokenizers import DOCUMENT_IDS_FILE, TOKENIZER_FILE

TOKENIZER_SHA256 = "tokenizer_sha256"
"""Key in a checkpoint: `tokenizer_sha256` of the run. Missing without a tokenizer."""
PROMPT_START = "prompt_start"
"""Key in a checkpoint: a list of ids. Empty: the tokenizer's BOS, if it has one. Missing in imported checkpoints."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and what it holds beside its tensors.

    Attributes:
        values: Lightning's dict, with tensors without data.
    """

    path: Path
    values: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Nothing is verified.

        Raises:
            UserError: It is missing, in another format, or checkpoint.pt cannot be loaded.
        """
        return cls(path, read_values(path))

    @property
    def step(self) -> int:
        """Optimizer steps behind it; 0 if it does not say."""
        return int(self.values.get("global_step", 0))

    @property
    def reason_of_end(self) -> str | None:
        """What a callback such as EarlyStopping had decided when it was saved: a kill may come before `ENDED` is written."""
        states = [state for state in self.values.get("callbacks", {}).values() if isinstance(state, Mapping)]
        for state in states:
            waited, patience = state.get("wait_count"), state.get("patience")
            if state.get("stopping_reason_message") and type(waited) is int and type(patience) is int and waited >= patience:
                return f"early stopping: {state['stopping_reason_message']}"
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, by key. Empty if the checkpoint stores none."""
        found: Mapping[str, Any] = self.values.get(SETTINGS, {})
        return found

    @property
    def prompt_start(self) -> list[int]:
        """The ids with which prompts start instead of BOS; empty for BOS, or none without it."""
        return list(self.values.get(PROMPT_START, []))

    def tokenizer_problem(self, run: Path | None = None) -> str | None:
        """A sentence if the tokenizer in a run folder is not that of the checkpoint. None also if one of them is missing.

        Args:
            run: the folder; None: the one that holds the checkpoint.
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
        """Raise a UserError with the sentence of `tokenizer_problem`, naming the flag --run."""
        if problem := self.tokenizer_problem(run):
            raise UserError(f"{problem} (--run)")


def tokenizer_sha256(run: Path) -> str:
    """SHA-256, in hex, of tokenizer.json, followed by document_ids.json, which imported folders lack: of `Tokenizer.files`."""
    content = hashlib.sha256(read_ordinary(run / TOKENIZER_FILE))
    if (run / DOCUMENT_IDS_FILE).is_file():
        content.update(read_ordinary(run / DOCUMENT_IDS_FILE))
    return content.hexdigest()


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """The checkpoint named `which` (last, best, stable) in a run folder.

    Raises:
        UserError: There is none. The message lists the existing ones.
    """
    path = run_dir / CHECKPOINTS / f"{which}.ckpt"
    if path.is_symlink() and path.exists():
        return path
    # Without links, or where a copy has a folder instead of each, the newest checkpoint tells the names.
    saved = checkpoints_in(run_dir / CHECKPOINTS)  # who loads it verifies it
    newest = next((each for each in saved if each.is_file() or intact_manifest(each) is not None), None)
    if newest is not None and which == "last":
        return newest
    if newest is not None:
        states = read_values(newest).get("callbacks", {})
        best = next((state["best_name"] for key, state in states.items() if "StepCheckpoint" in key), "")
        if which == "best" and best and Path(best).name == best and (newest.parent / best).exists():
            return newest.parent / str(best)
    if path.exists():
        return path
    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir} (--run_dir or --run)")
    names = sorted(p.name for p in (run_dir / CHECKPOINTS).glob("*.ckpt"))
    found = f"there are {', '.join(names)}" if names else "there is no checkpoint yet; train first with `fit`"
    raise UserError(f"run folder {run_dir} has no checkpoint '{which}': {found} (--ckpt_path)")


def named_checkpoint(run_dir: Path, ckpt_path: str) -> Path:
    """The checkpoint that `--ckpt_path` names: the last or best of a run folder, or any by its path.

    Raises:
        UserError: It does not exist.
    """
    if ckpt_path in ("last", "best"):
        return find_checkpoint(run_dir, ckpt_path)
    if not Path(ckpt_path).exists():
        raise UserError(f"there is no checkpoint {ckpt_path}; give last, best, or a file (--ckpt_path)")
    return Path(ckpt_path)
