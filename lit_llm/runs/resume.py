"""Where a launch starts: its run folder, the checkpoint that it goes on from, and whether what is asked for now fits that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lit_llm.data
from lit_llm.checkpoint.compatibility import model_changes, same_class
from lit_llm.checkpoint.format import read
from lit_llm.errors import UserError
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.runs.run_folder import (
    branch_run_dir,
    default_run_dir,
    existing_checkpoint,
    find_checkpoint,
    find_start,
    is_path,
    steps_made,
)


def choose_run_dir(named: str | None, resume: str, config_files: list[str]) -> Path:
    """The run folder: the one that `--run_dir` names, that of a branch with `--resume PATH`, or that of the recipe."""
    if named is not None:
        return Path(named)
    return branch_run_dir(config_files, Path(resume)) if is_path(resume) else default_run_dir(config_files)


@dataclass(frozen=True)
class RunStart:
    """What a launch goes on from, or evaluates."""

    checkpoint: Path | None = None
    """None: there is none, training begins at step 0."""
    step: int | None = None
    """Optimizer steps behind the checkpoint that training goes on from; None when it begins, or nothing is trained."""
    resume: str = "auto"
    """What config.yaml says of it: the checkpoint of another run where this one branched off, or that it began at step 0."""
    max_steps: int | None = None
    """The end that `--additional_steps` gives the run; None: the recipe's."""

    def changes(
        self,
        model: GPTConfig | None,
        architecture: Architecture | None,
        optimizer_class: str | None,
        data: object | None,
        *,
        accepted: bool,
    ) -> list[str]:
        """What the checkpoint does not fit, or what would make another run of it: one sentence each, with what can be done.

        Args:
            model, architecture, optimizer_class, data: what is asked for now; None where that is wrong in itself.
            accepted: changes that only make another run of it are wanted (`--accept_changes`).
        """
        if self.checkpoint is None:
            return []
        resumes = self.step is not None
        saved = read(self.checkpoint, verify=not resumes, lazy=True)  # what is resumed from has been verified
        if "model_config" not in saved:
            flag = "--resume" if resumes else "--ckpt_path"
            return [f"{self.checkpoint} is a checkpoint of another program: it has no model_config ({flag})"]
        found: list[str] = []
        if model is not None:
            found += model_changes(saved["model_config"], model, architecture, accepted=not resumes or accepted)
        before = saved.get("optimizer_class")
        if resumes and before is not None and optimizer_class is not None and not same_class(before, optimizer_class):
            found.append(
                f"the checkpoint was trained with {before}, whose state does not fit {optimizer_class} (--optimizer {before})"
            )
        if resumes and isinstance(data, lit_llm.data.TokenDataModule) and not accepted:
            found += data.changes_since(saved)
        return found

    def data_changes(self, data: lit_llm.data.TokenDataModule, vocab_size: int | None, *, accepted: bool) -> list[str]:
        """The same of what is known once the data are open: their fingerprint and, where the model follows it, vocabulary."""
        if self.checkpoint is None:
            return []
        saved = read(self.checkpoint, verify=False, lazy=True)
        found = [] if accepted else data.changes_since(saved)
        vocabulary = saved["model_config"]["vocab_size"]
        if vocab_size is None and data.vocab_size != vocabulary:
            found.append(
                f"the checkpoint's vocabulary has {vocabulary} ids and the data's {data.vocab_size}: these weights do not fit "
                "(--data.tokenizer)"
            )
        return found


def start_of_fit(run_dir: Path, resume: str, *, replace: bool, additional_steps: int | None) -> RunStart:
    """Where `fit` begins, with `--resume never|auto|PATH`.

    Raises:
        UserError: the checkpoint does not exist, is damaged or has no state of training, a run would be overwritten, or
            `additional_steps` has nothing to count from.
    """
    _refuse_a_file(run_dir)
    checkpoint, origin = find_start(run_dir, resume, replace=replace)
    if checkpoint is not None and "optimizer_states" not in read(checkpoint, verify=False, lazy=True):
        raise UserError(
            f"{checkpoint} holds weights only, no state of training to resume; start a run from it with "
            f"--init_from {checkpoint} --run_dir DIR"
        )
    max_steps = None
    if additional_steps is not None:
        if not is_path(resume):
            raise UserError(
                "additional_steps counts from the checkpoint that --resume PATH names; "
                f"--resume {resume} names none (--resume PATH, or --trainer.max_steps)"
            )
        if origin is None or origin != Path(resume).resolve():
            raise UserError(
                f"additional_steps makes a branch of {resume}, which needs a folder of its own: {run_dir} "
                "is that of the checkpoint (--run_dir DIR, or --trainer.max_steps to continue it there)"
            )
        # Not from where a branch that was interrupted goes on: its end must not move.
        max_steps = steps_made(origin) + additional_steps
    step = None if checkpoint is None else steps_made(checkpoint)
    return RunStart(checkpoint, step, "auto" if origin is None else str(origin), max_steps)


def start_of_evaluation(run_dir: Path, ckpt_path: str) -> RunStart:
    """The weights that `validate` and `test` look at: last, best, or a checkpoint's path.

    Raises:
        UserError: there is no such checkpoint.
    """
    _refuse_a_file(run_dir)
    named = ckpt_path in ("last", "best")
    return RunStart(find_checkpoint(run_dir, ckpt_path) if named else existing_checkpoint(ckpt_path))


def _refuse_a_file(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file, a run needs a folder (--run_dir)")
