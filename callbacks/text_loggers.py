"""Text for the loggers that take it."""

from __future__ import annotations

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn


def takes_text(logger: Logger) -> bool:
    """Whether `log_text` writes something: a logger of TensorBoard, W&B or MLflow."""
    return isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger)


def log_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Write a text at an optimizer step; other loggers get none. Call on rank 0.

    TensorBoard has it under its tag, W&B as a table of one row, MLflow as an artifact, a file of that name.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(tag, markdown(text), global_step=step)
    elif isinstance(logger, WandbLogger):
        logger.log_text(tag, columns=["step", "text"], data=[[str(step), text]], step=step)
    elif isinstance(logger, MLFlowLogger):
        try:
            logger.experiment.log_text(logger.run_id, text, f"{tag}/step-{step:08d}.txt")
        except OSError as error:  # LoggerErrors does not see this call
            rank_zero_warn(f"MLFlowLogger cannot write the text {tag} of step {step}: {error.strerror or error}.")


def markdown(text: str) -> str:
    """A Markdown code block of `text`.

    TensorBoard renders text as Markdown, which would drop white space and `#`, `*`, `_`. The block is indented, not
    fenced, because the text may contain a fence.
    """
    return "\n".join("    " + line for line in text.split("\n"))
