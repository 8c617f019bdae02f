"""Decides where a launch starts: its run folder, its checkpoint, and whether the current settings fit that checkpoint.

Rank 0 decides. It checks the lock of the run folder, verifies the checkpoint and compares the settings. A single process hashes
every file of the checkpoint. Several processes hash its shards while loading, each some of them (`FolderCheckpointIO`). Ranks
above 0 parse the same command line before a process group exists. They only find out that a checkpoint exists;
`FolderCheckpointIO.load_checkpoint` then gives them the path that rank 0 has chosen.

A branch is a run that continues from a checkpoint of another run (its origin), in a folder of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_llm.data
from lit_llm.checkpoint.adapters import saved_lora
from lit_llm.checkpoint.compatibility import group_changes, lora_changes, model_changes, same_class
from lit_llm.checkpoint.disk_format import checkpoints_in, damage_before_load, newest_good
from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError, report
from lit_llm.core.ranks import is_rank_zero
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.runs.lock import RunLock
from lit_llm.runs.run_folder import (
    CHECKPOINTS,
    branch_run_dir,
    default_run_dir,
    expanded,
    holds_run,
    origin_of,
    reason_of_end,
)
from lit_llm.runs.saved_run import SavedRun, named_checkpoint
from lit_llm.runs.setting_changes import ENDINGS, Change, rule, setting_changes


def is_path(resume: str) -> bool:
    """Whether `resume`, the value of `--resume`, is the path of a checkpoint: neither "auto" nor "never"."""
    return resume not in ("auto", "never")


def choose_run_dir(named: str | None, resume: str, config_files: list[str]) -> Path:
    """The path of the run folder: `named` (--run_dir), or else `branch_run_dir` with `--resume PATH`, else `default_run_dir`.

    Raises:
        UserError: The path is empty, or has an environment variable that is not set.
    """
    if named is not None:
        return expanded(named)
    return expanded(branch_run_dir(config_files, Path(resume)) if is_path(resume) else default_run_dir(config_files))


@dataclass(frozen=True)
class RunStart:
    """Record of a launch's start: the checkpoint that it continues from or evaluates, and what follows from the checkpoint."""

    saved: SavedRun | None = None
    """The checkpoint; None: training starts at step 0. On ranks above 0 it shows only that a checkpoint exists: it is not
    verified, its `values` are empty if it cannot be read, and loading takes the path from rank 0."""
    step: int | None = None
    """The optimizer step of the checkpoint from which training continues. None: training starts at step 0, the launch is an
    evaluation, or this rank is not rank 0."""
    resume: str = "auto"
    """The value of `resume` for config.yaml: the checkpoint of another run from which this run branched off, or "auto"."""
    max_steps: int | None = None
    """The value of trainer.max_steps that follows from `--additional_steps`; None without that flag."""
    lock: RunLock | None = None
    """The lock of the run folder, checked but not yet acquired; None for evaluations and on ranks above 0."""
    announced: tuple[str, ...] = ()
    """The accepted changes of settings since the checkpoint, as `key before → now`."""
    ended: str | None = None
    """Why the run ended at this checkpoint before its last step, such as early stopping; None if it did not."""

    @property
    def checkpoint(self) -> Path | None:
        return None if self.saved is None else self.saved.path

    @property
    def end(self) -> str | None:
        """Why there is nothing to train (`ended`); None if training goes on: the run has not ended early, or an important
        setting has changed. Important settings decide where a run ends, or make a different run. Changes of data do not count.
        """
        changed = [line.partition(" ")[0] for line in self.announced]
        return self.ended if all(rule(key) is Change.ANNOUNCED and key not in ENDINGS for key in changed) else None

    def changes(
        self,
        model: GPTConfig | None,
        architecture: Architecture | None,
        lora: LoRAConfig | None,
        optimizer_class: str | None,
        data: object | None,
        *,
        accepted: bool,
    ) -> list[str]:
        """Return one sentence for each setting that differs from the checkpoint's, with the flag that resolves it.

        Args:
            model, architecture, lora, optimizer_class, data: The current settings; None for settings that are invalid already.
            accepted: Whether to leave out differences that only make a different run (`--accept_changes`).
        """
        if self.saved is None or not is_rank_zero():
            return []
        resumes, saved = self.step is not None, self.saved.values
        if "model_config" not in saved:
            flag = "--resume" if resumes else "--ckpt_path"
            return [f"{self.checkpoint} is a checkpoint of another program: it has no model_config ({flag})"]
        changes: list[str] = []
        if model is not None:
            changes += model_changes(saved["model_config"], model, architecture, accepted=not resumes or accepted)
            changes += group_changes(saved["model_config"], model) if resumes and accepted and architecture is None else []
        changes += lora_changes(saved_lora(saved), lora, accepted=not resumes or accepted)
        before = saved.get("optimizer_class")
        if resumes and before is not None and optimizer_class is not None and not same_class(before, optimizer_class):
            changes.append(
                f"the checkpoint was trained with {before}, whose state does not fit {optimizer_class} (--optimizer {before})"
            )
        if resumes and isinstance(data, lit_llm.data.TokenDataModule) and not accepted:
            changes += data.changes_since(saved)
        if (problem := self.saved.tokenizer_problem()) is not None and not (resumes and accepted):
            changes.append(f"{problem} ({'--accept_changes true continues without it' if resumes else '--run_dir'})")
        return changes

    def setting_changes(
        self, settings: Mapping[str, Any], *, compares_data: bool, accepted: bool
    ) -> tuple[list[str], list[str]]:
        """Compare the settings in the checkpoint with the current `settings` (key → value).

        Returns (sentences about refused changes, announced changes as `key before → now`). If `accepted`, or at the start of a
        branch, changes that make a different run are announced, not refused. If `compares_data`, the data module compares data.
        """
        assert self.saved is not None
        branches = is_path(self.resume) and real_path(self.saved.path) == real_path(self.resume)
        return setting_changes(self.saved.settings, settings, accepted=accepted or branches, compares_data=compares_data)

    def saved_data(self, data: lit_llm.data.TokenDataModule) -> dict[str, Any] | None:
        """The state dict of the data module in the checkpoint from which training continues; None if there is no such state."""
        if self.saved is None or self.step is None:
            return None
        return self.saved.values.get(type(data).__qualname__)

    def data_changes(self, data: lit_llm.data.TokenDataModule, vocab_size: int | None, *, accepted: bool) -> list[str]:
        """Return one sentence for each difference from the checkpoint that shows only when the data are open.

        Args:
            vocab_size: the model's setting. None: the data decide it, so their vocabulary is compared with the checkpoint's.
            accepted: Whether to leave out that the data differ. A vocabulary of another size always counts.
        """
        if self.saved is None:
            return []
        saved = self.saved.values
        changes = [] if accepted else data.changes_since(saved)
        vocabulary = saved["model_config"].get("vocab_size")
        if vocab_size is None and data.vocab_size != vocabulary:
            changes.append(
                f"the checkpoint's vocabulary has {vocabulary} ids and the data's {data.vocab_size}: these weights do not fit "
                "(--data.tokenizer)"
            )
        return changes


def start_of_fit(run_dir: Path, resume: str, *, replace: bool, additional_steps: int | None, ranks: int = 1) -> RunStart:
    """Decide where `fit` starts. `resume` (never, auto or a path), `replace` and `additional_steps` are flags of `fit`.

    Args:
        ranks: Number of processes that load the checkpoint. Several processes hash its shards while loading, not here.

    Raises:
        UserError: Another process uses the run folder; the checkpoint does not exist, is damaged or has no training state; a
            run would be overwritten; `additional_steps` has no checkpoint to count from.
    """
    _refuse_what_is_no_folder(run_dir)
    lock: RunLock | None = None
    if not is_rank_zero():
        saved = _unverified(next(_candidates(run_dir, resume), None))
        origin = Path(resume) if is_path(resume) else None
    else:
        lock = RunLock(run_dir)
        lock.refuse_if_held()
        saved, origin = find_start(run_dir, resume, replace=replace, ranks=ranks)
    step = max_steps = ended = None
    if saved is not None and is_rank_zero():
        if "optimizer_states" not in saved.values:
            raise UserError(
                f"{saved.path} holds weights only, no training state to resume; start a run from it with "
                f"--init_from {saved.path} --run_dir DIR"
            )
        step = saved.step
    if additional_steps is not None:
        max_steps = _end_of_branch(run_dir, resume, origin, additional_steps, saved)
    # Training goes on in any case if --replace is true, or if --resume names a checkpoint of this run.
    anew = replace or (is_path(resume) and Path(resume).absolute().is_relative_to(run_dir.absolute()))
    if saved is not None and step is not None and not anew:
        is_here = saved.path.absolute().is_relative_to(run_dir.absolute())  # not the origin of a branch
        ended = reason_of_end(run_dir, step) or (saved.reason_of_end if is_here else None)
    resume = "auto" if origin is None else str(origin)
    return RunStart(saved, step, resume, max_steps, lock, ended=ended)


def start_of_plan(run_dir: Path, resume: str) -> RunStart:
    """The `RunStart` of a `fit` that is only planned: its checkpoint and step. Takes no lock, and compares no checksums.

    Raises:
        UserError: The checkpoint that `resume` names cannot be read. With "auto", such checkpoints are skipped.
    """
    for checkpoint in _candidates(run_dir, resume):
        try:
            saved = SavedRun.read(_target(checkpoint))
        except UserError:
            if is_path(resume):
                raise
        else:
            return RunStart(saved, step=saved.step)
    return RunStart()


def _end_of_branch(run_dir: Path, resume: str, origin: Path | None, additional_steps: int, newest: SavedRun | None) -> int:
    """The last optimizer step of a branch: the step of its origin, plus `--additional_steps`.

    Args:
        origin: the checkpoint of another run from which the branch starts; None: no branch, which raises a UserError.
        newest: the checkpoint from which training continues: `origin`, or a checkpoint of the branch.
    """
    if not is_path(resume):
        raise UserError(
            "additional_steps counts from the checkpoint that --resume PATH names; "
            f"--resume {resume} names none (--resume PATH, or --trainer.max_steps)"
        )
    if origin is None or real_path(origin) != real_path(resume):
        raise UserError(
            f"additional_steps makes a branch of {resume}, which needs a folder of its own: {run_dir} "
            "is that of the checkpoint (--run_dir DIR, or --trainer.max_steps to continue it there)"
        )
    # Steps count from the origin, not from the newest checkpoint of an interrupted branch, so that the end does not move.
    begins = newest if newest is not None and real_path(newest.path) == real_path(origin) else SavedRun.read(origin)
    return begins.step + additional_steps


def start_of_evaluation(run_dir: Path, ckpt_path: str, *, ranks: int = 1) -> RunStart:
    """The `RunStart` of `validate` and `test`: the checkpoint that `ckpt_path` names, "last", "best" or a path.

    Args:
        ranks: Number of processes that load the checkpoint.

    Raises:
        UserError: The checkpoint does not exist, or is damaged.
    """
    _refuse_what_is_no_folder(run_dir)
    checkpoint = _target(named_checkpoint(run_dir, ckpt_path))
    if is_rank_zero() and (damage := damage_before_load(checkpoint, ranks=ranks)):
        raise UserError(damage)
    return RunStart(SavedRun.read(checkpoint) if is_rank_zero() else _unverified(checkpoint))


def find_start(run_dir: Path, resume: str, *, replace: bool, ranks: int = 1) -> tuple[SavedRun | None, Path | None]:
    """(verified checkpoint to start from, or None for step 0; checkpoint of another run from which this run branched, or None).

    `resume` is never, auto or a PATH. A PATH in the run folder continues the run from that checkpoint. A PATH of another run
    starts a branch, or continues the branch that the folder holds. auto skips damaged checkpoints, with a warning for each.

    Args:
        ranks: Number of processes that load the checkpoint.

    Raises:
        UserError: PATH is missing, damaged or not a checkpoint; a run would be overwritten; every checkpoint is damaged.
    """
    if resume == "never":
        if holds_run(run_dir) and not replace:
            raise UserError(
                f"run folder {run_dir} already holds a run; continue it with --resume auto, "
                "set it aside with --replace true, or write elsewhere with --run_dir DIR"
            )
        return None, None
    if resume == "auto":
        if replace:
            raise UserError("--resume auto continues the run folder and --replace true sets it aside: give one of them")
        origin = origin_of(run_dir)
    else:
        path = Path(resume)
        if path.absolute().is_relative_to(run_dir.absolute()):
            if replace:
                raise UserError(f"{path} is in the run folder that --replace true would set aside (--run_dir DIR)")
            return _verified(path, ranks=ranks), origin_of(run_dir)
        origin = real_path(path)  # a link such as stable.ckpt may be changed later
        if replace or origin_of(run_dir) != origin:
            checkpoint = _verified(path, ranks=ranks)
            if holds_run(run_dir) and not replace:
                raise UserError(
                    f"run folder {run_dir} holds a run that did not start from {path}; continue that with --run "
                    f"{run_dir} --resume auto, set it aside with --replace true, or write elsewhere with --run_dir DIR"
                )
            return checkpoint, origin
    newest = _newest_good(run_dir, ranks=ranks)
    if newest is None and origin is not None:
        newest = _verified(origin, ranks=ranks)
    return newest, origin


def _candidates(run_dir: Path, resume: str) -> Iterator[Path]:
    """Yield the checkpoints from which `find_start` chooses, its first choice first. Nothing is verified."""
    if is_path(resume):
        yield Path(resume)
    elif resume == "auto":
        yield from checkpoints_in(run_dir / CHECKPOINTS)
        yield from filter(None, [origin_of(run_dir)])


def _unverified(checkpoint: Path | None) -> SavedRun | None:
    """The checkpoint as a `SavedRun`, not verified, for ranks above 0. If the checkpoint cannot be read, `values` is empty."""
    if checkpoint is None:
        return None
    with contextlib.suppress(UserError):
        return SavedRun.read(checkpoint)
    return SavedRun(checkpoint, {})


def _newest_good(run_dir: Path, *, ranks: int) -> SavedRun | None:
    good, damaged = newest_good(run_dir / CHECKPOINTS, shards=ranks == 1)
    if good is None and damaged:
        raise UserError("\n".join([*damaged, f"no checkpoint of {run_dir} can be read; start again with --replace true"]))
    report("\n".join(f"{problem} It is skipped." for problem in damaged), "warning")
    return None if good is None else SavedRun.read(good)


def _verified(path: Path, *, ranks: int) -> SavedRun:
    path = _target(path)
    if not path.exists():
        raise UserError(f"there is no checkpoint {path} to resume from (--resume PATH, or --resume auto)")
    if path.is_dir() and holds_run(path):
        raise UserError(
            f"{path} is a run folder: continue that run with --run {path} --resume auto, or begin another one from one of its "
            f"checkpoints with --resume {path / CHECKPOINTS / 'last.ckpt'}"
        )
    if path.name == CHECKPOINTS and path.is_dir():
        raise UserError(f"{path} holds the checkpoints of a run: name one of them (--resume {path / 'last.ckpt'})")
    if damage := damage_before_load(path, ranks=ranks):
        raise UserError(f"{damage} (--resume auto takes the newest good one)")
    return SavedRun.read(path)


def _target(path: Path) -> Path:
    """The checkpoint to which the link `path`, such as last.ckpt, points now: a running `fit` may change the link later."""
    return path.parent / path.readlink() if path.is_symlink() else path


def _refuse_what_is_no_folder(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file, a run needs a folder (--run_dir)")
