"""Scores of tasks during training: multiple-choice files, and tasks of lm_eval."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from ._lightning import TASKS, _AfterSteps, callback_of, evaluation_mode, write_row
from .contracts import ScoresText, offered
from .ema import EMA
from .errors import UserError, refused, setting, without
from .log_likelihoods import LogLikelihoods, Pair
from .multiple_choice import Question, read_questions, scores
from .progress_bar import format_duration
from .ranges import STEPS, check_ranges, whole
from .stop_on_signal import StopOnSignal


@contextlib.contextmanager
def _naming_tasks() -> Iterator[None]:
    """Context manager that adds the name of the setting `tasks` to the message of a UserError raised in it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')} ({setting(TaskScores, 'tasks')}).") from error.__cause__


class TaskScores(_AfterSteps):
    """Scores the model on tasks every `every_n_steps` steps and at the end of training, on any layout of ranks.

    A name that ends in `.jsonl` is a file of multiple-choice questions (`read_questions`). Any other name is a task or group of
    the package lm_eval, or a YAML file of such a task. Nothing is downloaded. The scores equal the scores of
    `lm_eval --model hf` for the exported model, if both compute in the same precision.

    With the callback EMA, the scored weights are the average, as in validation, if `EMA(validate=True)`.

    The LightningModule must have `tokenizer`, `context_length`, and for tasks that generate text `greedy_ids` (`contracts.py`).

    Logs: `task/NAME/METRIC`. For a file of questions, METRIC is `acc`, `acc_norm` and `bits_per_byte`
    (`multiple_choice.scores`), for a task of lm_eval the task's own metrics. Prints one line for each task.

    Contract:
        setup: reads files, loads tasks and their data.
        on_fit_start: checks that the module can be scored, and that its tokenizer can read every question and answer.
        on_train_batch_end: scores at due optimizer steps, and at `max_steps` if `at_end`, on every rank.
        on_train_end: scores if `at_end` and the last step is not scored yet, but not after a signal (StopOnSignal).
        on_validation_end, on_test_end: score the model in `trainer.validate` and `trainer.test`.
        Random state and train/eval mode are restored. The Trainer's profiler gets the action "score_tasks".
        State: none. List this callback before the checkpoint callback, so that a step's scores are logged before its save.

    Args:
        tasks: paths of .jsonl files and YAML files, and names of lm_eval's tasks and groups.
        every_n_steps: optimizer steps between two evaluations; null = only at the end.
        at_end: score the final model, too.
        limit: score only this many questions of each task, the first ones; null = all.
        batch_size: texts that a rank computes at once. Their logits are in memory: batch_size × longest text × vocabulary.

    Raises:
        UserError: numbers out of range; a task that is not on this machine, or that this module cannot do; a choice that
            cannot be scored (the message names its task and row).
    """

    def __init__(
        self,
        tasks: list[str],
        every_n_steps: Annotated[int | None, whole(1, STEPS)] = None,
        at_end: bool = True,
        limit: Annotated[int | None, whole(1, 10**9)] = None,
        batch_size: Annotated[int, whole(1, 10**6)] = 16,
    ) -> None:
        check_ranges(TaskScores, locals())
        if every_n_steps is None and not at_end:
            raise UserError(
                f"tasks are never scored: set {setting(TaskScores, 'every_n_steps')}, or {setting(TaskScores, 'at_end')} true."
            )
        if not tasks:
            raise UserError(refused(TaskScores, "tasks", "is empty: name a file, such as questions.jsonl, or a task"))
        self.tasks = tasks
        self.every_n_steps = every_n_steps
        self.at_end = at_end
        self.limit = limit
        self.batch_size = batch_size
        self.score_names: list[str] = []  # the names of what is logged, known when training starts
        self._files: dict[str, list[Question]] = {}
        self._lm_eval: Any = None
        self._fits = False
        self._scored = 0  # the last optimizer step scored, or from which training started

    # -- before training ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fits |= stage == "fit"
        if not self._files and self._lm_eval is None:
            with isolate_rng():
                self._load()

    @_naming_tasks()
    def _load(self) -> None:
        others = [name for name in self.tasks if not name.endswith(".jsonl")]
        names = []
        for file in (Path(name) for name in self.tasks if name.endswith(".jsonl")):
            self._files[file.stem] = questions = read_questions(file, self.limit)
            self.score_names += [
                f"task/{file.stem}/{metric}" for metric in scores(questions[:1], [[0.0] * len(questions[0].choices)])
            ]
            names.append(file.stem)
        if others:
            try:
                importlib.import_module("lm_eval.models.utils")
            except ModuleNotFoundError as error:
                if error.name != "lm_eval":
                    raise
                raise UserError(
                    f"{', '.join(others)}: tasks other than .jsonl files need the package lm-eval: pip install lm-eval."
                ) from None
            from .lm_eval_tasks import LmEvalTasks

            self._lm_eval = LmEvalTasks(others, self.limit)
            names += self._lm_eval.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"two tasks have the name {twice[0]}: rename one.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)  # before the sanity check, which asks for the names of metrics

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._scored = trainer.global_step

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if offered(pl_module, ScoresText) is None:
            raise UserError(
                f"TaskScores needs a tokenizer and a context_length of the module, which {type(pl_module).__name__} does not"
                f" have: {without(TaskScores)}."
            )
        scorer = LogLikelihoods(trainer, pl_module, self.batch_size)
        with _naming_tasks():
            self._pairs(scorer)
        if self._lm_eval is not None:
            with _naming_tasks(), isolate_rng():
                names = [f"task/{name}" for name in self._lm_eval.check(scorer)]
            self.score_names = list(dict.fromkeys([*self.score_names, *names]))

    # -- when -------------------------------------------------------------------------------------------------------------

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        due = self.every_n_steps is not None and step % self.every_n_steps == 0
        if due or (self.at_end and step == trainer.max_steps):
            self._score(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal = getattr(callback_of(trainer, StopOnSignal), "stopped_by", None)
        if self.at_end and signal is None and trainer.global_step != self._scored:
            self._score(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._fits:  # `trainer.validate`, not that of a run
            self._check(trainer, pl_module)
            self._score(trainer, pl_module)

    on_test_end = on_validation_end

    # -- scores -----------------------------------------------------------------------------------------------------------

    def _score(self, trainer: Trainer, pl_module: LightningModule) -> None:
        since = time.monotonic()
        with trainer.profiler.profile(TASKS), contextlib.ExitStack() as stack:  # type: ignore[attr-defined]
            if self._fits and (ema := callback_of(trainer, EMA)):
                stack.enter_context(ema.averaged(pl_module))
            stack.enter_context(evaluation_mode(trainer, pl_module))
            row = self._row(LogLikelihoods(trainer, pl_module, self.batch_size))
        row = trainer.strategy.broadcast(row)  # what every rank then monitors is the same, to the last bit
        self._scored = trainer.global_step
        write_row(trainer, {f"task/{name}": value for name, value in row.items()}, trainer.global_step)
        step = trainer.global_step if self._fits else None  # `trainer.validate` does not know it
        pl_module.print(format_scores(step, row, time.monotonic() - since))

    def _row(self, scorer: LogLikelihoods) -> dict[str, float]:
        row: dict[str, float] = {}
        choice_scores = iter(scorer.score(self._pairs(scorer)))
        for name, questions in self._files.items():
            values = [[next(choice_scores).log_likelihood for _ in question.choices] for question in questions]
            row |= {f"{name}/{metric}": value for metric, value in scores(questions, values).items()}
        return row if self._lm_eval is None else row | self._lm_eval.scores(scorer)

    def _pairs(self, scorer: LogLikelihoods) -> list[Pair]:
        """The pair (ids of the query, ids of the choice) for each choice of each question of all files, in this order."""
        rows = [(f"task {name}, row {i}", row) for name, rows in self._files.items() for i, row in enumerate(rows, start=1)]
        return [scorer.pair(place, *texts) for place, row in rows for texts in row.pairs()]


def format_scores(step: int | None, row: Mapping[str, float], seconds: float) -> str:
    """Text like "tasks after step 500 (3s)", and below it a line for each task: "  arc_easy  acc 0.25  acc_norm 0.27"."""
    lines: dict[str, str] = {}
    for name, value in row.items():
        task, _, metric = name.rpartition("/")
        lines[task] = f"{lines.get(task, f'  {task}')}  {metric} {value:.5g}"
    title = "tasks" if step is None else f"tasks after step {step}"
    return "\n".join([f"{title} ({format_duration(seconds)})", *lines.values()])
