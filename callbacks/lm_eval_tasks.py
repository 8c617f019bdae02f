"""Tasks of lm_eval (EleutherAI's lm-evaluation-harness) on the model that is being trained.

Imported when a task needs it: the package is optional.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import huggingface_hub
import lm_eval.api.task
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from .errors import UserError
from .log_likelihoods import LogLikelihoods

_FEWSHOT_SEED = 1234  # of the command `lm_eval`
_GENERATED = 256  # most tokens of an answer, unless the task says it: as of `lm_eval --model hf`


class LmEvalTasks:
    """Tasks and groups of lm_eval, loaded without a download, and tried on one question each.

    Args:
        names: of bundled tasks and groups, and YAML files.
        limit: only the first questions of each task.

    Raises:
        UserError: a task or its data are not on this machine, or the task is of a kind that cannot run here.
    """

    def __init__(self, names: Sequence[str], limit: int | None) -> None:
        self.limit = limit
        # Data sets are only read from this machine. HF_HUB_OFFLINE in the environment would be too late: it is read at import.
        offline = [patch.object(owner, "HF_HUB_OFFLINE", True) for owner in (datasets.config, huggingface_hub.constants)]
        with _quiet(), offline[0], offline[1]:
            self._loaded = _load(names)
            for name, task in self._loaded["tasks"].items():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                if _generation(task).get("do_sample"):
                    raise UserError(
                        f"task {name} draws its answers at random, which training would not repeat: set do_sample: false in "
                        "its generation_kwargs (--tasks.tasks)."
                    )
            try:
                self.metrics = list(self._evaluate(_Constant(), 1))  # as `scores` names them
            except Exception as error:
                raise UserError(
                    f"the tasks {', '.join(names)} fail on their first question: {_described(error)} (--tasks.tasks)."
                ) from error

    @property
    def names(self) -> list[str]:
        """Of all tasks, those of groups included."""
        return list(self._loaded["tasks"])

    def problem(self, context_length: int) -> str | None:
        """Why a model of this context cannot run the tasks; None if it can."""
        for name, task in self._loaded["tasks"].items():
            if (generated := _generation(task).get("max_gen_toks", 0)) >= context_length:
                return (
                    f"task {name} generates up to {generated} tokens, but the model's context has {context_length}: set a "
                    "smaller max_gen_toks in its generation_kwargs (--tasks.tasks)."
                )
        return None

    def scores(self, scorer: LogLikelihoods) -> dict[str, float]:
        """`TASK/METRIC` of each task and group, with the names of lm_eval. A filter's name follows after an underscore."""
        with _quiet():
            return self._evaluate(_Running(scorer), self.limit)

    def _evaluate(self, model: LM, limit: int | None) -> dict[str, float]:
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)  # each evaluation shows the same examples
        found = evaluator.evaluate(model, self._loaded, limit=limit, bootstrap_iters=0, log_samples=False)
        row = {}
        for task, metrics in found["results"].items():
            for name, value in metrics.items():
                metric, _, kind = name.partition(",")
                if kind and not metric.endswith("_stderr") and isinstance(value, numbers.Real):
                    row[f"{task}/{metric}" if kind == "none" else f"{task}/{metric}_{kind}"] = float(value)
        return row


def _load(names: Sequence[str]) -> Any:
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"{file} does not exist (--tasks.tasks).")
    manager = TaskManager(include_defaults=len(files) < len(names))  # reading all bundled tasks takes seconds
    for name in set(names) - set(files):
        if name not in manager.all_tasks:
            raise UserError(
                f"{name} is neither a task of lm_eval nor a file that ends in .yaml or .jsonl (--tasks.tasks); the names are "
                "printed by: lm_eval ls tasks"
            )
    try:
        return manager.load(list(names))
    except Exception as error:  # a missing file or package, YAML, the templates and functions of users
        raise UserError(
            f"the tasks {', '.join(names)} cannot be loaded from this machine, and nothing is downloaded during training: "
            f"{_described(error)} (--tasks.tasks); a data set of the hub must be in its cache before."
        ) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"


def _generation(task: Any) -> dict[str, Any]:
    """The settings of a task that generates text; none of another."""
    given = task.get_config("generation_kwargs") or {}
    return normalize_gen_kwargs(given, _GENERATED) if task.OUTPUT_TYPE == "generate_until" else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log and the bars of lm_eval and datasets, which would break this program's."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with patch.object(lm_eval.api.task, "tqdm", lambda documents, **_: documents):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.utils.logging.enable_progress_bar()


class _Constant(LM):
    """Answers without a model, to see that a task can be asked and judged."""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [-1.0] * len(requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [""] * len(requests)


class _Running(LM):
    """The model that is being trained. One rank for lm_eval, because `LogLikelihoods` shares the work itself."""

    def __init__(self, scorer: LogLikelihoods) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = [self.scorer.pair(*request.args) for request in requests]
        return [(score.log_likelihood, score.is_greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        scorer, pairs, owners = self.scorer, [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                scorer.encode(text), prefix_token=scorer.start_id, max_seq_len=scorer.length, context_len=1
            ):
                pairs.append(make_disjoint_window(window))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, score in zip(owners, scorer.score(pairs), strict=True):
            totals[i] += score.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """The likeliest continuation, up to the first stop text. Every rank computes all of it."""
        scorer = self.scorer
        settings = normalize_gen_kwargs(settings, _GENERATED)
        most = settings["max_gen_toks"]
        stops = [stop for stop in settings["until"] if stop]
        ids = scorer.encode(context)[most - scorer.length :] or [scorer.start_id]
        text, new = "", []
        for token in scorer.pl_module.greedy_ids(ids, max_new_tokens=most):  # type: ignore[operator]
            new.append(token)
            text = scorer.tokenizer.decode(new)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.split(stop)[0]
        return text
