"""Run folders: their files and their lock, and the choice of the checkpoint from which a launch starts or continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_llm.runs.loaded_run import LoadedRun


def load(run: str | Path) -> LoadedRun:
    """Load a run folder, for notebooks: an object with its curves, texts, settings and checkpoints.

    Raises:
        UserError: `run` is not a run folder.
    """
    from lit_llm.runs.loaded_run import LoadedRun  # TensorBoard takes a second to import
    from lit_llm.runs.run_folder import expanded

    return LoadedRun(expanded(run, key="run", flag="--run"))
