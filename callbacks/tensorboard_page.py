"""One TensorBoard page with the four charts to look at first."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

# TensorBoard matches tags as regular expressions at the beginning: without the anchors "lr" also matches "lr/embedding".
LAYOUT = {
    "training": {
        "loss": ["Multiline", ["^train/loss$", "^val/loss$"]],
        "learning rate": ["Multiline", ["^lr$", "^lr/"]],
        "gradient norm": ["Multiline", ["^grad/norm$", "^grad/norm_clipped$"]],
        "throughput (tokens/s)": ["Multiline", ["^throughput/tokens_per_second$"]],
    }
}


class TensorBoardPage(Callback):
    """Lays out loss (training and validation), learning rate, gradient norm and throughput under "Custom Scalars".

    Logs: the layout. Without a TensorBoardLogger it does nothing.

    Contract:
        on_train_start: writes the layout on rank 0 (again after a resume: TensorBoard shows the last one).
        State: none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(LAYOUT)  # on other ranks `experiment` is a dummy that does nothing
