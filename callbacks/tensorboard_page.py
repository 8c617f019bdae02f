"""One TensorBoard page with the charts to look at first."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from .task_scores import TaskScores

# TensorBoard matches tags as regular expressions at the beginning: without the anchors "lr" also matches "lr/embedding".
CHARTS = {
    "loss": ["Multiline", ["^train/loss$", "^val/loss$"]],
    "learning rate": ["Multiline", ["^lr$", "^lr/"]],
    "gradient norm": ["Multiline", ["^grad/norm$", "^grad/norm_clipped$"]],
    "throughput (tokens/s)": ["Multiline", ["^throughput/tokens_per_second$"]],
}
BY_SOURCE = {
    "training loss by source": ["Multiline", ["^train/[^/]+/loss$"]],
    "validation loss by source": ["Multiline", ["^val/[^/]+/loss$"]],
}

BY_TASK = {"accuracy by task": ["Multiline", ["^task/.+/acc$"]]}


class TensorBoardPage(Callback):
    """Lays out loss (training and validation), learning rate, gradient norm and throughput under "Custom Scalars".

    If the data module lists `source_names`, also the losses of its sources. With TaskScores, also accuracies.

    Logs: the layout. Without a TensorBoardLogger it does nothing.

    Contract:
        on_train_start: writes the layout on rank 0 (again after a resume: TensorBoard shows the last one).
        State: none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sources = getattr(getattr(trainer, "datamodule", None), "source_names", ())
        scored = any(isinstance(callback, TaskScores) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        charts = CHARTS | (BY_SOURCE if sources else {}) | (BY_TASK if scored else {})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # On other ranks `experiment` is a dummy that does nothing.
                logger.experiment.add_custom_scalars({"training": charts})
