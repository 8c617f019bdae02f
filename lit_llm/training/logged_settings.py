"""The settings of a run for its loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from lit_llm.runs.setting_changes import Change, rule

METRICS = ("val/loss", "val/bits_per_byte", "train/loss")
"""Beside the settings in TensorBoard's tab of hyper-parameters: the last values of these curves."""
CONFIG_TAG = "settings/config.yaml"
"""TensorBoard sorts texts by tag: this one is below the samples."""
_ALSO = ("trainer.max_steps", "trainer.precision", "trainer.devices")


def log_settings(logger: Logger, settings: Mapping[str, Any], config: str, step: int) -> None:
    """Write the settings once per launch. Call on rank 0.

    TensorBoard gets config.yaml as a text, and a row of its tab of hyper-parameters: the settings that change the result,
    in the run's own event file. A resumed run repeats both, and TensorBoard shows one. Other loggers get all settings by key.

    Args:
        settings: by key.
        config: the content of config.yaml.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(CONFIG_TAG, f"```yaml\n{config}\n```", step)
        if writer := logger.experiment.file_writer:
            experiment, start, _ = hparams(shown(settings), dict.fromkeys(METRICS, 0.0))
            writer.add_summary(experiment)
            writer.add_summary(start)
        return
    known: Mapping[str, Any] = {}
    if isinstance(logger, MLFlowLogger):  # it refuses to change what a continued run has
        known = logger.experiment.get_run(logger.run_id).data.params
    logger.log_hyperparams({key: value for key, value in settings.items() if key not in known})


def shown(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings that change the result, without those that are null, as TensorBoard takes them."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        decides = rule(key) in (Change.REFUSED, Change.MODEL, Change.DATA) or key in _ALSO
        if decides and value is not None:
            found[key] = value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
    return found
