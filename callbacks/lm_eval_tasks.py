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
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from .errors import UserError
from .log_likelihoods import LogLikelihoods, Pair, Score

_FEWSHOT_SEED = 1234  # of the command `lm_eval`
_GENERATED = 256  # most tokens of an answer, unless the task says it: as of `lm_eval --model hf`
_GREEDY = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""Generation settings that a task may have; do_sample must be false. Any further setting, such as num_beams, must be 1."""


class LmEvalTasks:
    """Tasks and groups of lm_eval, loaded without a download.

    Args:
        names: names of bundled tasks and groups, and paths of YAML files.
        limit: use only this many questions of each task, the first ones. None: all.

    Raises:
        UserError: a task or its data are not on this machine, or a task does not decode greedily.
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
                settings = _generation(task).items()
                if others := [f"{k}: {v}" for k, v in settings if (k not in _GREEDY and v != 1) or (k == "do_sample" and v)]:
                    raise UserError(
                        f"task {name} sets {others[0]}, but answers are the likeliest tokens here, which training repeats: "
                        "remove it from its generation_kwargs."
                    )

    @property
    def names(self) -> list[str]:
        """The names of all tasks, including the tasks in groups."""
        return list(self._loaded["tasks"])

    def check(self, scorer: LogLikelihoods) -> list[str]:
        """Let lm_eval ask and judge every question with dummy answers. Returns the names of the scores that `scores` returns.

        Raises:
            UserError: a question or answer cannot be scored. Without this check, lm_eval would fail during training.
        """
        for name, task in self._loaded["tasks"].items():
            if (generated := _generation(task).get("max_gen_toks", 0)) >= scorer.length:
                raise UserError(
                    f"task {name} generates up to {generated} tokens, but the model's context has {scorer.length}: set a "
                    "smaller max_gen_toks in its generation_kwargs."
                )
        try:
            return list(self._evaluate(_Trial(scorer)))
        except UserError:
            raise
        except Exception as error:
            names = ", ".join(self.names)
            raise UserError(f"one of the tasks {names} fails on a question: {_described(error)}.") from error

    def scores(self, scorer: LogLikelihoods) -> dict[str, float]:
        """Scores by name: `TASK/METRIC`, or `TASK/METRIC_FILTER` if a filter extracts the answers. All names are lm_eval's."""
        return self._evaluate(_Running(scorer))

    def _evaluate(self, model: LM) -> dict[str, float]:
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)  # each evaluation shows the same examples
        with _quiet():
            evaluation = evaluator.evaluate(model, self._loaded, limit=self.limit, bootstrap_iters=0, log_samples=False)
        row = {}
        for task, metrics in evaluation["results"].items():
            for name, value in metrics.items():
                metric, _, kind = name.partition(",")
                if kind and not metric.endswith("_stderr") and isinstance(value, numbers.Real):
                    row[f"{task}/{metric}" if kind == "none" else f"{task}/{metric}_{kind}"] = float(value)
        return row


def _load(names: Sequence[str]) -> Any:
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"{file} does not exist.")
    manager = TaskManager(include_defaults=len(files) < len(names))  # reading all bundled tasks takes seconds
    for name in set(names) - set(files):
        if name not in manager.all_tasks:
            raise UserError(
                f"{name} is neither a task of lm_eval nor a file that ends in .yaml or .jsonl; the names are "
                "printed by: lm_eval ls tasks"
            )
    try:
        return manager.load(list(names))
    except Exception as error:  # a missing file or package, YAML, the templates and functions of users
        raise UserError(
            f"the tasks {', '.join(names)} cannot be loaded from this machine, and nothing is downloaded during training: "
            f"{_described(error)}; a data set of the hub must be in its cache before."
        ) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"


def _generation(task: Any) -> dict[str, Any]:
    """The generation settings of a task that generates text; an empty dict for any other task."""
    given = task.get_config("generation_kwargs") or {}
    return normalize_gen_kwargs(given, _GENERATED) if task.OUTPUT_TYPE == "generate_until" else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that hides progress bars and warnings of lm_eval and datasets, which would break the training's bar."""
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


class _Running(LM):
    """Gives lm_eval the model in training. lm_eval sees one rank, because `LogLikelihoods` divides the work among ranks."""

    def __init__(self, scorer: LogLikelihoods) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = [self.scorer.pair(_place(request), *request.args) for request in requests]
        return [(score.log_likelihood, score.is_greedy) for score in self.scores(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        windows = [self._windows(_place(request), *request.args) for request in requests]
        scores = iter(self.scores([pair for of_text in windows for pair in of_text]))
        return [sum(next(scores).log_likelihood for _ in of_text) for of_text in windows]

    def _windows(self, place: str, text: str) -> list[Pair]:
        """Divide a text into windows that fit the model. Returns a pair (ids of the context, ids to score) for each window."""
        ids, start = self.scorer.encode(text), self.scorer.start_ids
        if not ids:
            return []
        self.scorer.require(place, (start, ids[:1]), text)
        windows = get_rolling_token_windows(ids, start[0], self.scorer.length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def scores(self, pairs: list[Pair]) -> list[Score]:
        return self.scorer.score(pairs)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """The greedy continuation, up to the first stop text, without special tokens. Every rank computes the same text."""
        scorer, tokenizer = self.scorer, self.scorer.tokenizer
        settings = normalize_gen_kwargs(settings, _GENERATED)
        most, eos, ends = settings["max_gen_toks"], getattr(tokenizer, "eos_id", None), getattr(tokenizer, "stop_ids", ())
        stops = handle_stop_sequences(settings["until"], None if eos is None else tokenizer.decode([eos]))
        ids = scorer.encode(context)[most - scorer.length :] or scorer.start_ids
        new: list[int] = []
        for token in scorer.pl_module.greedy_ids(ids, max_new_tokens=most):  # type: ignore[operator]
            new.append(token)
            if token in ends or any(stop in tokenizer.decode(new) for stop in stops):
                break
        hidden = getattr(tokenizer, "special_ids", ())
        return str(postprocess_generated_text(tokenizer.decode([i for i in new if i not in hidden]), stops, None))


class _Trial(_Running):
    """Gives lm_eval dummy answers in place of the model's, to test that lm_eval can ask every question and judge its answer."""

    def scores(self, pairs: list[Pair]) -> list[Score]:
        return [Score(-1.0, False)] * len(pairs)

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        return ""


def _place(request: Instance) -> str:
    return f"task {request.task_name}, row {request.doc_id + 1}"
