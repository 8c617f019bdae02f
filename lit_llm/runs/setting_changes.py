"""What happens if a setting differs from the checkpoint that a run continues from: one table of rules, by prefix of the key.

A key is the name of the setting's flag. Checkpoints have settings under "settings"; without that entry nothing is compared.
A branch is a run that continues from a checkpoint of another run, in a folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from lit_llm.core.yaml_reading import as_flag

SETTINGS = "settings"
"""Key in a checkpoint: a dict of the run's settings, defaults of classes included, without those whose rule is FREE."""


class Change(Enum):
    """The rule of a setting: what happens if its value differs from the value in the checkpoint."""

    FREE = "free"
    """The setting does not change losses or weights, so its value may differ."""
    ANNOUNCED = "announced"
    """The new value applies, and a printed line says so: numbers change by rounding, or the length of the run changes."""
    REFUSED = "refused"
    """The new value would make a different run, and is refused. With --accept_changes true, or in a branch, it is ANNOUNCED."""
    MODEL = "compared with the weights"
    """`checkpoint.compatibility` compares the setting with the weights. A change of the weights' shapes is always refused."""
    DATA = "compared with the data"
    """A TokenDataModule compares its samples itself, such as the text. For other data modules, the rule REFUSED applies."""


_RULES: dict[Change, str] = {
    Change.FREE: """
        run_dir async_checkpoints sharded_checkpoints init_from resume replace accept_changes check_against check_tolerance
        additional_steps hang_timeout log_dir use_ema
        health histograms validation throughput plan time_breakdown gradient_noise stragglers doctor profile samples tasks page
        progress signals checkpoint
        data.num_workers data.cache_dir
        trainer.logger trainer.fast_dev_run trainer.limit_val_batches trainer.limit_test_batches trainer.limit_predict_batches
        trainer.val_check_interval trainer.check_val_every_n_epoch trainer.num_sanity_val_steps trainer.log_every_n_steps
        trainer.enable_checkpointing trainer.enable_progress_bar trainer.enable_model_summary trainer.inference_mode
        trainer.profiler trainer.detect_anomaly trainer.barebones trainer.default_root_dir trainer.enable_autolog_hparams
        trainer.model_registry
    """,
    Change.ANNOUNCED: """
        compute loss.chunk_size data.micro_batch_size ema
        optimizer.fused optimizer.foreach optimizer.capturable optimizer.differentiable optimizer.ns_dtype
        trainer.accelerator trainer.strategy trainer.devices trainer.num_nodes trainer.precision trainer.plugins
        trainer.callbacks trainer.deterministic trainer.benchmark trainer.use_distributed_sampler trainer.sync_batchnorm
        trainer.max_steps trainer.max_epochs trainer.max_time trainer.min_steps trainer.min_epochs
        trainer.limit_train_batches trainer.reload_dataloaders_every_n_epochs
    """,
    Change.REFUSED: """
        seed_everything objective loss optimizer schedule gradient_norm spike_guard expert_balance
        trainer.accumulate_grad_batches trainer.gradient_clip_val trainer.gradient_clip_algorithm trainer.overfit_batches
    """,
    Change.MODEL: "model architecture lora",
    Change.DATA: "data batch_ramp",
}
RULES: dict[str, Change] = {prefix: change for change, prefixes in _RULES.items() for prefix in prefixes.split()}
"""Prefix of a setting's key → rule. For a key, its longest prefix in this dict decides."""

_OF_A_MACHINE = """
    run_dir log_dir replace resume init_from accept_changes hang_timeout check_against check_tolerance page profile progress
    data.num_workers data.cache_dir data.path data.paths data.train data.val data.test
    trainer.devices trainer.logger trainer.profiler trainer.default_root_dir trainer.enable_progress_bar
    trainer.enable_model_summary
"""
OF_A_MACHINE = tuple(f"{prefix}." for prefix in _OF_A_MACHINE.split())
"""Prefixes of keys whose values may differ between ranks: paths, and settings of one process. Data are compared by content."""

ENDINGS = frozenset(f"trainer.{key}" for key in ("callbacks", "max_steps", "max_epochs", "max_time", "min_steps", "min_epochs"))
"""Keys of settings that decide where a run ends. If one changes, a run that ended before its last step continues."""

_NOTES = {"trainer.max_steps": "a schedule that ends with the run ends there"}
_RATES = ("optimizer.lr", "optimizer.adamw_lr")
_OF_DECAY = "no effect: Decay starts at the rate of the checkpoint"


def rule(key: str) -> Change | None:
    """What happens if the setting `key` differs from the checkpoint: a rule. None if `RULES` has no prefix of the key."""
    parts = key.split(".")
    return next((RULES[prefix] for n in range(len(parts), 0, -1) if (prefix := ".".join(parts[:n])) in RULES), None)


def to_remember(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint stores: all except those whose rule is FREE."""
    return {key: value for key, value in settings.items() if rule(key) is not Change.FREE}


def same_on_all_ranks(settings: Mapping[str, Any]) -> dict[str, str]:
    """Key → value as text, of the settings that must be equal on all ranks. Paths, which may differ, are replaced by PATH."""
    common = {key: as_flag(value) for key, value in settings.items() if not f"{key}.".startswith(OF_A_MACHINE)}
    return {key: re.sub(r'[^"\s]*/[^"\s]*', "PATH", value) for key, value in common.items()}


def setting_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, accepted: bool, compares_data: bool
) -> tuple[list[str], list[str]]:
    """Compare the settings of a checkpoint, `saved`, with those of the run, `now`. Both are dicts: key → value.

    Not compared are settings that only one of them has, the optimizer's class, and arguments of a class that has changed.

    Args:
        accepted: Whether changes under the rule REFUSED are announced, not refused (`--accept_changes`, or a branch).
        compares_data: Whether to leave changes under the rule DATA to the data module (`TokenDataModule.changes_since`).

    Returns:
        (sentences about refused changes, with the flags that resolve them; announced changes, as `key before → now`).
    """
    refused, announced = list[str](), list[str]()
    other_class = tuple(
        f"{key}." for key, value in now.items() if key in saved and _is_class(saved[key], value) and saved[key] != value
    )
    for key, value in now.items():
        if key not in saved or saved[key] == value or _effective(saved, key) == _effective(now, key):
            continue
        if key == "optimizer":  # another class is always refused, by `RunStart.changes`
            continue
        if key.startswith(other_class):  # arguments of another class are other settings, even with the same name
            continue
        change = rule(key) or Change.REFUSED
        if change is Change.DATA:
            change = Change.FREE if compares_data else Change.REFUSED
        before = saved[key]
        if change is Change.ANNOUNCED or (change is Change.REFUSED and accepted):
            decays = key in _RATES and str(now.get("schedule")).endswith(".Decay")
            note = _OF_DECAY if decays else _NOTES.get(key)
            announced.append(f"{key} {as_flag(before)} → {as_flag(value)}{f' ({note})' if note else ''}")
        elif change is Change.REFUSED:
            refused.append(
                f"{key} was {as_flag(before)} in the checkpoint and is {as_flag(value)} (--{key} {as_flag(before)}, or "
                "--accept_changes true)"
            )
    return refused, announced


def _is_class(before: Any, now: Any) -> bool:
    """Whether each of the two values of a setting is the dotted path of a class, or None, which turns the class off."""
    return all(value is None or (isinstance(value, str) and "." in value) for value in (before, now))


def _effective(settings: Mapping[str, Any], key: str) -> Any:
    """The value of the setting `key`. For `schedule.total_steps`, None stands for the value of trainer.max_steps."""
    value = settings[key]
    return settings.get("trainer.max_steps") if key == "schedule.total_steps" and value is None else value
