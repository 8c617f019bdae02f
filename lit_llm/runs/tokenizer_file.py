"""Whether a run's tokenizer.json is the one with which a checkpoint was trained."""

from __future__ import annotations

from pathlib import Path

from lit_llm.checkpoint.crash_safe import sha256_of
from lit_llm.checkpoint.format import read
from lit_llm.errors import UserError
from lit_llm.runs.run_folder import CHECKPOINTS
from lit_llm.tokenizers import TOKENIZER_FILE

TOKENIZER_SHA256 = "tokenizer_sha256"
"""Key in a checkpoint: SHA-256 of the run's tokenizer.json, in hex. Missing without a tokenizer, and in old checkpoints."""


def run_of(checkpoint: Path) -> Path:
    """The run folder that holds a checkpoint."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def tokenizer_problem(checkpoint: Path, run: Path) -> str | None:
    """A sentence if the tokenizer.json in `run` is not that of a verified checkpoint. None also if one of them is missing."""
    file = run / TOKENIZER_FILE
    expected = read(checkpoint, verify=False, lazy=True).get(TOKENIZER_SHA256)
    if expected is None or not file.is_file() or sha256_of(file) == expected:
        return None
    return (
        f"{file} is not the file with which {checkpoint.resolve().name} was trained, so ids would mean other text: restore it"
    )


def require_tokenizer(checkpoint: Path, run: Path) -> None:
    """Raise a UserError with the sentence of `tokenizer_problem`, naming the flag --run."""
    if problem := tokenizer_problem(checkpoint, run):
        raise UserError(f"{problem} (--run)")
