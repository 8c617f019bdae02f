"""What a checkpoint says about text: whether a run's tokenizer files are its own, and the ids that a prompt starts with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lit_llm.checkpoint.format import read_values
from lit_llm.core.disk import read_ordinary
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import CHECKPOINTS
from lit_llm.tokenizers import DOCUMENT_IDS_FILE, TOKENIZER_FILE

TOKENIZER_SHA256 = "tokenizer_sha256"
"""Key in a checkpoint: `tokenizer_sha256` of the run. Missing without a tokenizer."""
PROMPT_START = "prompt_start"
"""Key in a checkpoint: a list of ids. Empty: the tokenizer's BOS, if it has one. Missing in imported and old checkpoints."""


def run_of(checkpoint: Path) -> Path:
    """The run folder that holds a checkpoint."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def tokenizer_sha256(run: Path) -> str:
    """SHA-256, in hex, of tokenizer.json, followed by document_ids.json if there is one: of `Tokenizer.files`."""
    content = hashlib.sha256(read_ordinary(run / TOKENIZER_FILE))
    if (run / DOCUMENT_IDS_FILE).is_file():
        content.update(read_ordinary(run / DOCUMENT_IDS_FILE))
    return content.hexdigest()


def tokenizer_problem(checkpoint: Path, run: Path) -> str | None:
    """A sentence if the tokenizer in `run` is not that of a verified checkpoint. None also if one of them is missing."""
    file = run / TOKENIZER_FILE
    expected = read_values(checkpoint).get(TOKENIZER_SHA256)
    if expected is None or not file.is_file() or tokenizer_sha256(run) == expected:
        return None
    return (
        f"{file} is not the file with which {checkpoint.resolve().name} was trained, or {DOCUMENT_IDS_FILE} beside it was "
        "changed, so ids would mean other text: restore both"
    )


def require_tokenizer(checkpoint: Path, run: Path) -> None:
    """Raise a UserError with the sentence of `tokenizer_problem`, naming the flag --run."""
    if problem := tokenizer_problem(checkpoint, run):
        raise UserError(f"{problem} (--run)")


def prompt_start(checkpoint: Path) -> list[int]:
    """The ids with which prompts start instead of BOS; empty for BOS, or none without it."""
    return list(read_values(checkpoint).get(PROMPT_START, []))
