"""TensorBoard: the logger of a run that may be resumed, and one page with the charts to look at first."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ._lightning import callback_of
from .contracts import HasSources, offered_by_data
from .task_scores import TaskScores

# TensorBoard matches tags as regular expressions at the beginning: without the anchors "lr" also matches "lr/embedding".
# Training and validation loss are two charts, because TensorBoard scales a chart by all its curves.
QUALITY = {"validation loss": "^val/loss$", "training loss": "^train/loss$", "bits per byte": "^val/.*bits_per_byte$"}
BY_SOURCE = {"training loss by source": "^train/[^/]+/loss$", "validation loss by source": "^val/[^/]+/loss$"}
BY_TASK = {"accuracy by task": "^task/.+/acc$"}
HEALTH = {
    "learning rate": "^lr$ ^lr/",
    "gradient norm": "^grad/norm$ ^grad/norm_clipped$",
    "fraction of steps clipped": "^grad/clip_fraction$",
    "skipped steps": "^spike/skipped$",
    "update norm / weight norm": "^health/update_ratio/",
    "largest attention logit": "^health/attention_logit_max/",
    "root mean square of activations": "^health/activation_rms/",
    "entropy of the output (nats)": "^health/output_entropy$",
}
SPEED = {
    "throughput (tokens/s)": "^throughput/tokens_per_second$",
    "fractions of the time": "^time/.+_fraction$",
    "peak memory (GB)": "^memory/peak_gb$ ^plan/peak_gb$",
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
        quality = QUALITY | (BY_SOURCE if sources else {}) | (BY_TASK if callback_of(trainer, TaskScores) else {})
        page = {
            category: {title: ["Multiline", tags.split()] for title, tags in charts.items()}
            for category, charts in {"quality": quality, "health": HEALTH, "speed": SPEED}.items()
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # On other ranks `experiment` is a dummy that does nothing.
                logger.experiment.add_custom_scalars(page)


def tensorboard_logger(run_dir: Path, resume_step: int | None) -> TensorBoardLogger:
    """Event files in `run_dir` itself, behind those of earlier launches.

    Args:
        resume_step: the optimizer step from which training is resumed. Rows of later steps, which an interrupted run wrote
            after its checkpoint, are removed. None: every row is.
    """
    wait_for_later_name(run_dir)
    return TensorBoardLogger(save_dir=run_dir, name="", version="", purge_step=0 if resume_step is None else resume_step + 1)


def wait_for_later_name(run_dir: Path) -> None:
    """Wait until an event file made now has a name behind those in the folder: at most two seconds, usually none.

    TensorBoard reads the files of a folder in the order of their names, which begin with the second
    (`events.out.tfevents.1795495981.host.pid.number`). If a run is continued in the second in which it began, the process
    number decides. Read in the wrong order, the first file removes the rows of the second. If the clock is further behind, a
    warning says so.
    """
    names = (re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in run_dir.glob("events.*"))
    ahead = max((int(name[1]) for name in names if name), default=0) + 1 - time.time()
    if ahead > 2:
        rank_zero_warn(
            f"An event file in {run_dir} is {ahead:.0f} s ahead of this machine's clock. TensorBoard reads the files in the "
            "order of their names and may leave out rows; metrics.jsonl has them all. Set the clock."
        )
    elif ahead > 0:
        time.sleep(ahead + 0.01)  # a sleep may end a little early by this clock
