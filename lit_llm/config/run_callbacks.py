"""List all callbacks of a run in the order of their calls: callbacks of the recipe, and callbacks that every run has."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from lit_llm import callbacks
from lit_llm.config.groups import LAUNCH_ONLY
from lit_llm.config.run_spec import RunSpec
from lit_llm.runs.resume import is_path
from lit_llm.runs.setting_changes import to_remember
from lit_llm.training.folder_guard import FolderGuard
from lit_llm.training.monitor_checks import RequireMonitor, StayEnded, ValidateLast
from lit_llm.training.progress_watch import ProgressWatch
from lit_llm.training.save_config import SaveRunFolder


def run_callbacks(
    spec: RunSpec, own: list[Callback], groups: list[Callback], *, saves: bool, progress_bar: bool
) -> list[Callback]:
    """Return the callbacks that are passed to the Trainer, in the order of their calls.

    Args:
        own: the callbacks in the setting trainer.callbacks.
        groups: the callbacks of the recipe's groups, in the order of `groups.CALLBACKS`.
        saves: whether the run writes its folder.
        progress_bar: whether progress is shown. False: the callback TrainingProgress is left out.
    """
    chosen = [each for each in groups if progress_bar or not isinstance(each, callbacks.TrainingProgress)]
    if not spec.fits:  # an evaluation has no other callbacks of groups than these two
        return [*own, *(c for c in chosen if isinstance(c, callbacks.TrainingProgress | callbacks.TaskScores))]
    kept = [callbacks.LoggerErrors(), *own, *chosen]
    if spec.config.model.moe and not any(isinstance(callback, callbacks.ExpertBalance) for callback in kept):
        kept.append(callbacks.ExpertBalance(rate=0.0))  # logs the experts' loads, and changes no biases
    kept += [callbacks.StepSeed(int(spec.config.seed_everything)), callbacks.DDPBucketWarmup()]
    if saves:
        left_out = LAUNCH_ONLY if is_path(spec.config.resume) else (*LAUNCH_ONLY, "resume")  # a branch records its origin
        text, settings = spec.as_yaml(without=left_out), to_remember(spec.settings())
        kept.append(SaveRunFolder(text, settings, scratch=spec.scratch))
    return kept if spec.scratch else [*_of_launches(spec, kept)]


def _of_launches(spec: RunSpec, kept: list[Callback]) -> Iterator[Callback]:
    """Yield the callbacks `kept` in their order, and before, between and after them those that every launch of `fit` has."""
    yield ProgressWatch(spec.config.hang_timeout, spec.log_dir or spec.run_dir)
    yield StayEnded(spec.start.end is not None)
    for callback in kept:
        if isinstance(callback, EarlyStopping | callbacks.StepCheckpoint):
            yield RequireMonitor(callback)
        yield callback
    if not any(isinstance(callback, callbacks.ValidateEvery) for callback in kept):
        yield ValidateLast()
    if spec.start.lock is not None:
        yield FolderGuard(spec.run_dir, spec.start, replace=spec.config.replace)
