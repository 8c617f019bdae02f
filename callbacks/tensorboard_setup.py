"""TensorBoard: the logger of a run that may be resumed, and one page with the charts to look at first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from ._lightning import is_logged

# TensorBoard matches tags as regular expressions at the beginning: without the anchors "lr" also matches "lr/embedding".
# Training and validation loss are two charts, because TensorBoard scales a chart by all its curves.
CHARTS = {
    "quality": {
        "validation loss": "^val/loss$",
        "training loss": "^train/loss$",
        "bits per byte": "^val/.*bits_per_byte$",
        "accuracy by task": "^task/.+/acc$",
        "divergence from teacher or reference (nats per token)": "^train/kl$ ^val/kl$",
    },
    "mixture": {"training loss by source": "^train/[^/]+/loss$", "validation loss by source": "^val/[^/]+/loss$"},
    "preferences": {
        "margin of rewards": "^train/margin$ ^val/margin$",
        "accuracy": "^train/accuracy$ ^val/accuracy$",
        "rewards": "^train/reward_",
        "log-likelihoods (nats per document)": "^train/logp_",
    },
    "experts": {
        "tokens of the busiest expert / mean": "^experts/load$",
        "experts without a token": "^experts/dead$",
        "entropy of the router (nats)": "^experts/entropy$",
        "largest bias": "^experts/bias$",
    },
    "health": {
        "learning rate": "^lr$ ^lr/",
        "gradient norm": "^grad/norm$ ^grad/norm_clipped$",
        "fraction of steps clipped": "^grad/clip_fraction$",
        "skipped steps": "^spike/skipped$",
        "update norm / weight norm": "^health/update_ratio/",
        "largest attention logit": "^health/attention_logit_max/",
        "root mean square of activations": "^health/activation_rms/",
        "entropy of the output (nats)": "^health/output_entropy$",
    },
    "speed": {
        "throughput (tokens/s)": "^throughput/tokens_per_second$",
        "fractions of the time": "^time/.+_fraction$",
        "peak memory (GB)": "^memory/peak_gb$ ^plan/peak_gb$",
    },
}
"""Category → title of a chart → regular expressions that match the chart's tags, separated by spaces."""


class TensorBoardPage(Callback):
    """Lays out charts under "Custom Scalars" by category: quality, mixture, preferences, experts, health and speed.

    A chart appears when one of its tags has been logged, so a page has no empty charts.

    Logs: the layout. Without a TensorBoardLogger it does nothing.

    Contract:
        on_train_batch_end, after a logged step, on_validation_end, on_train_end: if there are new metrics in
            `trainer.callback_metrics`, writes the layout on rank 0. TensorBoard shows the last layout.
        State: the titles of the charts.
    """

    def __init__(self) -> None:
        self._titles: set[str] = set()
        self._laid_out: set[str] = set()  # by this launch
        self._metrics = 0  # how many have been looked at

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if is_logged(trainer, trainer.global_step):
            self._lay_out(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._lay_out(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lay_out(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"titles": sorted(self._titles)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._titles = set(state_dict["titles"])

    def _lay_out(self, trainer: Trainer) -> None:
        names = list(trainer.callback_metrics)
        if len(names) == self._metrics:
            return
        self._metrics = len(names)
        for charts in CHARTS.values():
            drawn = ((title, tag) for title, tags in charts.items() for tag in tags.split())
            self._titles |= {title for title, tag in drawn if any(re.match(tag, name) for name in names)}
        if self._titles == self._laid_out:
            return
        self._laid_out = set(self._titles)
        page = {
            category: {title: ["Multiline", tags.split()] for title, tags in charts.items() if title in self._titles}
            for category, charts in CHARTS.items()
            if self._titles & charts.keys()
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # On other ranks `experiment` is a dummy that does nothing.
                logger.experiment.add_custom_scalars(page)


def tensorboard_logger(run_dir: Path, resume_step: int | None) -> TensorBoardLogger:
    """A TensorBoardLogger that writes event files into `run_dir` itself, beside the event files of earlier launches.

    Args:
        resume_step: the optimizer step from which training is resumed. Rows of later steps, which an interrupted run wrote
            after its checkpoint, are removed. None: all rows of earlier launches are removed.
    """
    return TensorBoardLogger(save_dir=run_dir, name="", version="", purge_step=0 if resume_step is None else resume_step + 1)
