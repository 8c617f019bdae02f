"""One TensorBoard page with the charts to look at first."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from .contracts import HasSources, offered_by_data
from .task_scores import TaskScores

# TensorBoard matches tags as regular expressions at the beginning: without the anchors "lr" also matches "lr/embedding".
# Training and validation loss are two charts, because TensorBoard scales a chart by all its curves.
QUALITY = {
    "validation loss": ["Multiline", ["^val/loss$"]],
    "training loss": ["Multiline", ["^train/loss$"]],
    "bits per byte": ["Multiline", ["^val/bits_per_byte$"]],
}
BY_SOURCE = {
    "training loss by source": ["Multiline", ["^train/[^/]+/loss$"]],
    "validation loss by source": ["Multiline", ["^val/[^/]+/loss$"]],
}
BY_TASK = {"accuracy by task": ["Multiline", ["^task/.+/acc$"]]}
HEALTH = {
    "learning rate": ["Multiline", ["^lr$", "^lr/"]],
    "gradient norm": ["Multiline", ["^grad/norm$", "^grad/norm_clipped$"]],
    "fraction of steps clipped": ["Multiline", ["^grad/clip_fraction$"]],
    "skipped steps": ["Multiline", ["^spike/skipped$"]],
    "update norm / weight norm": ["Multiline", ["^health/update_ratio/"]],
    "largest attention logit": ["Multiline", ["^health/attention_logit_max/"]],
    "root mean square of activations": ["Multiline", ["^health/activation_rms/"]],
    "entropy of the output (nats)": ["Multiline", ["^health/output_entropy$"]],
}
SPEED = {
    "throughput (tokens/s)": ["Multiline", ["^throughput/tokens_per_second$"]],
    "fractions of the time": ["Multiline", ["^time/.+_fraction$"]],
    "peak memory (GB)": ["Multiline", ["^memory/peak_gb$", "^plan/peak_gb$"]],
}


class TensorBoardPage(Callback):
    """Lays out the charts under "Custom Scalars" in three categories: quality, health and speed.

    If the data module lists `source_names`, quality also has the losses of its sources; with TaskScores, accuracies.

    Logs: the layout. Without a TensorBoardLogger it does nothing.

    Contract:
        on_train_start: writes the layout on rank 0 (again after a resume: TensorBoard shows the last one).
        State: none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = offered_by_data(trainer, HasSources)
        sources = () if data is None else data.source_names
        scored = any(isinstance(callback, TaskScores) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        quality = QUALITY | (BY_SOURCE if sources else {}) | (BY_TASK if scored else {})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # On other ranks `experiment` is a dummy that does nothing.
                logger.experiment.add_custom_scalars({"quality": quality, "health": HEALTH, "speed": SPEED})
