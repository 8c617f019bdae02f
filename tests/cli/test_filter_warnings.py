"""Messages of callbacks are printed, Lightning's own are not."""

import logging

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_llm.cli.filter_warnings import filter_warnings


def test_callbacks_are_heard_and_lightning_is_not():
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        filter_warnings()
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)  # "GPU available: False, used: False"
        rank_zero_info("plan: peak memory 1.02 GB measured, 1 GB planned")
    finally:
        logger.removeHandler(handler)
    assert said == ["plan: peak memory 1.02 GB measured, 1 GB planned"]
