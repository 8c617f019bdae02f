"""Generated text during training, for the loggers that take text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
from typing import Annotated

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from ._lightning import SAMPLES, _AfterSteps, evaluation_mode
from .contracts import WritesText, offered
from .errors import UserError, without
from .ranges import INT64, STEPS, Domain, check_ranges, whole


def tags_of(prompts: Sequence[str]) -> list[str]:
    """Return a readable tag for each prompt, such as "samples/def" for "def ". No two of the tags are equal."""
    tags: list[str] = []
    for prompt in prompts:
        name = "samples/" + (re.sub(r"[^\w.-]+", "-", prompt)[:40].strip("-.") or "prompt")
        numbered = (f"{name}-{number}" for number in count(2))
        tags.append(next(tag for tag in chain([name], numbered) if tag not in tags))
    return tags


class TextSamples(_AfterSteps):
    """Continues the same prompts every `every_n_steps` optimizer steps, so that the continuations can be compared.

    Needs `LightningModule.generate_text` (`contracts.py`). The seed is the same each time, so only the model changes.

    Logs: text `samples/<prompt>` (prompt and continuation, the prompt shortened to a tag) to loggers of TensorBoard, W&B
    and MLflow. Without such a logger, this callback generates no text.

    Contract:
        on_train_start: checks that the module can generate.
        on_train_batch_end: generates at due optimizer steps, on every rank (a sharded model needs all); rank 0 writes.
        on_train_end: generates, unless the last step was due.
        Random state and train/eval mode are restored. The Trainer's profiler gets the action "generate_samples".
        State: none.

    Args:
        prompts: texts to continue.
        every_n_steps: optimizer steps between two samples.
        max_new_tokens: length of a continuation, in tokens.
        temperature: divides the logits; 0 = greedy (always the most likely token).
        top_k: sample from the k most likely tokens; null = from all.
        seed: seed of the sampling generator.

    Raises:
        UserError: numbers out of range; the module has no `generate_text`.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: Annotated[int, whole(1, STEPS)],
        max_new_tokens: Annotated[int, whole(1, 10**9)] = 100,
        temperature: Annotated[float, Domain(0.001, 1000, also=(0,))] = 0.8,
        top_k: Annotated[int | None, whole(1, 10**9)] = 50,
        seed: Annotated[int, whole(-INT64, INT64)] = 0,
    ) -> None:
        check_ranges(TextSamples, locals())
        self.prompts = prompts
        self.every_n_steps = every_n_steps
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if offered(pl_module, WritesText) is None:
            raise UserError(
                f"TextSamples needs a method generate_text, which {type(pl_module).__name__} does not have:"
                f" {without(TextSamples)}."
            )
        super().on_train_start(trainer, pl_module)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if step % self.every_n_steps == 0:
            self._write(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if step > 0 and step % self.every_n_steps != 0:
            self._write(trainer, pl_module, step)

    def _write(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        loggers = [logger for logger in trainer.loggers if takes_text(logger)]
        if not loggers:
            return
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": None, "seed": self.seed}
        with trainer.profiler.profile(SAMPLES), evaluation_mode(trainer, pl_module):  # type: ignore[attr-defined]
            texts = [
                pl_module.generate_text(prompt, max_new_tokens=self.max_new_tokens, **sampling)  # type: ignore[operator]
                for prompt in self.prompts
            ]
        if trainer.is_global_zero:
            for prompt, tag, text in zip(self.prompts, tags_of(self.prompts), texts, strict=True):
                for logger in loggers:
                    log_text(logger, tag, text if text.startswith(prompt) else prompt + text, step)


def takes_text(logger: Logger) -> bool:
    """Whether `log_text` can write to the logger: it is a logger of TensorBoard, W&B or MLflow."""
    return isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger)


def log_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Write a text at an optimizer step to a logger of TensorBoard, W&B or MLflow; other loggers get none. Call on rank 0.

    TensorBoard shows the text under `tag`, W&B as a table of one row. MLflow stores an artifact `<tag>/step-<step>.txt`.
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
    """`text` as a Markdown code block.

    TensorBoard renders text as Markdown, which would drop white space and `#`, `*`, `_`. The block is indented, not
    fenced by ```, because the text may contain such a fence.
    """
    return "\n".join("    " + line for line in text.split("\n"))
