"""The data of a run that the rules of `doctor` read: logged curves, settings and launches, and statistics of these."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard, TypeVar

from lit_llm.runs.loaded_run import Series, setting_in

Points = list[tuple[int, float]]
"""(optimizer step, value) of each row, in the order of the steps."""


Row = TypeVar("Row")


class Unjudged(Exception):
    """Raised if a rule cannot judge a run. The argument is the name of the curve that is missing or has too few rows."""


@dataclass(frozen=True)
class Observed:
    """Record of a run for the rules: logged curves, settings, and the first steps of launches. A tag is a curve's name.

    Attributes:
        scalars: {tag: the curve's rows}.
        config: the settings in config.yaml; empty for a run without config.yaml.
        first_steps: for each launch, oldest first, the number of optimizer steps that were complete when the launch began.
        damages: a sentence for each file of the training data that is unreadable or has another hash than its manifest says.
        question: (whether the run's chat template writes the user's question, whether training counts the question as a
            target). None: no template is known.

    Raises:
        Unjudged: A method would return fewer than `least` values, or a curve has no value and the call has no `default`.
    """

    scalars: Mapping[str, Series]
    config: Mapping[str, Any] = field(default_factory=dict)
    first_steps: Sequence[int] = ()
    damages: Sequence[str] = ()
    question: tuple[bool, bool] | None = None

    _finite: dict[str, Points] = field(default_factory=dict, repr=False, compare=False)
    _smoothed: dict[str, Points] = field(default_factory=dict, repr=False, compare=False)

    def points(self, tag: str) -> Points:
        """Return (step, value) of every row of the curve `tag`, also NaN and infinity."""
        series = self.scalars.get(tag)
        return [] if series is None else list(zip(series.steps, series.values, strict=True))

    def finite(self, tag: str, least: int = 0) -> Points:
        """Return (step, value) of every row of the curve `tag` with a finite value."""
        if tag not in self._finite:
            self._finite[tag] = [(step, value) for step, value in self.points(tag) if math.isfinite(value)]
        return _enough(self._finite[tag], tag, least)

    def values(self, tag: str, after: int = 0, least: int = 0) -> list[float]:
        """Return the finite values of the curve `tag` at steps above `after`."""
        return _enough([value for step, value in self.finite(tag) if step > after], tag, least)

    def last(self, tag: str, default: float | None = None) -> float:
        """Return the last finite value of the curve `tag`; `default` if the curve has no finite value."""
        points = self.finite(tag, least=default is None)
        return points[-1][1] if points or default is None else default

    def counted(self, tag: str) -> Points:
        """Return (step, value) of the curve `tag`, the loss of a predictor that counts tokens or pairs, from reliable counts.

        Counts are reliable from 30 V counted pairs of tokens on, for a vocabulary of V tokens (measured for V = 256 to 1,024).
        """
        enough, size = dict(self.finite("health/counted_pairs")), self.last("setup/vocab_size", 0.0)
        return [(step, value) for step, value in self.finite(tag) if step > 1 and enough.get(step, math.inf) >= 30 * size]

    def recent(self, tag: str) -> float:
        """Return the median of the last five values that `counted(tag)` returns. A single value of few tokens would be noisy.

        Raises:
            Unjudged: There are fewer than two values.
        """
        return statistics.median(value for _, value in _enough(self.counted(tag), tag, 2)[-5:])

    def median(self, tag: str, after: int = 0, default: float | None = None) -> float:
        """Return the median of the finite values of the curve `tag` at steps above `after`; `default` without such values."""
        values = self.values(tag, after, least=default is None)
        return statistics.median(values) if values or default is None else default

    def by_layer(self, group: str, least: int = 0) -> dict[str, Points]:
        """Return {LAYER: (step, finite value) rows of the curve `health/GROUP/LAYER`}, without the summaries over layers."""
        prefix = f"health/{group}/"
        layers = [tag.removeprefix(prefix) for tag in self.scalars if tag.startswith(prefix)]
        curves = {layer: self.finite(prefix + layer) for layer in layers if layer not in ("lowest", "median", "highest")}
        _enough(max(curves.values(), key=len, default=[]), prefix + "LAYER", least)
        return curves

    def total(self, group: str, least: int = 0) -> Points:
        """Return (step, √(sum of squares of `health/GROUP/LAYER` over the layers)), the norm over all layers."""
        squares: dict[int, float] = {}
        for points in self.by_layer(group, least).values():
            for step, value in points:
                squares[step] = squares.get(step, 0.0) + value * value  # `value**2` raises beyond 1e154
        return [(step, math.sqrt(square)) for step, square in sorted(squares.items())]

    def smoothed(self, tag: str, least: int = 0) -> Points:
        """Return (step, median of the last five finite values) of the curve `tag`, from its fifth finite value on."""
        if tag not in self._smoothed:
            points = self.finite(tag)
            windows = (sorted(value for _, value in points[i - 4 : i + 1]) for i in range(4, len(points)))
            self._smoothed[tag] = [(step, window[2]) for (step, _), window in zip(points[4:], windows, strict=True)]
        return _enough(self._smoothed[tag], tag, least)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the setting with the dotted key `key`; `default` if the setting or a group above it is missing or null."""
        value = setting_in(self.config, key)
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """Return the setting with the dotted key `key` if its value is a finite number, else None."""
        value = self.setting(key)
        return value if is_number(value) else None

    @cached_property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.scalars.values() if series.steps), default=0)

    def start_of_launch(self, step: int) -> int:
        """Return the number of steps that were complete when the launch that made `step` began."""
        return next((first for first in reversed(self.first_steps) if first < step), 0)

    @cached_property
    def planned_steps(self) -> int | None:
        """The number of optimizer steps of the whole run (trainer.max_steps); None if it is not set."""
        planned = self.number("trainer.max_steps")
        return int(planned) if planned is not None and planned > 0 else None

    @cached_property
    def is_readable(self) -> bool:
        """Whether the run has a curve that rules may read: lr, or one whose name begins with train/, val/, health/ or grad/."""
        return any(tag.partition("/")[0] in ("train", "val", "health", "grad") or tag == "lr" for tag in self.scalars)

    @cached_property
    def is_complete(self) -> bool:
        """Whether the run has made at least 90 % of `planned_steps`; True if `planned_steps` is None."""
        return self.planned_steps is None or self.step >= 0.9 * self.planned_steps

    @cached_property
    def warmup_steps(self) -> int:
        """The step at which the learning rate reaches nine tenths of its highest value; 0 if no learning rate was logged."""
        rates = self.finite("lr")
        highest = max((rate for _, rate in rates), default=0.0)
        return next((step for step, rate in rates if rate >= 0.9 * highest), 0)

    @cached_property
    def from_scratch(self) -> bool:
        """Whether training started from random weights, by the settings. False for a run without settings."""
        return "init_from" in self.config and self.setting("init_from") is None and self.setting("lora") is None

    @cached_property
    def learns_text(self) -> bool:
        """Whether training started from random weights, with a vocabulary of at least 32 tokens."""
        return self.from_scratch and self.last("setup/vocab_size", 0.0) >= 32

    @cached_property
    def uniform_loss(self) -> float:
        """ln(vocabulary size): the loss in nats of a model that gives all tokens equal probabilities."""
        return math.log(self.last("setup/vocab_size"))

    @cached_property
    def behind_pairs(self) -> float | None:
        """Place of the training loss between the losses of two predictors that count pairs of tokens (0) or single tokens (1).

        None: one of the three losses is unknown, or too few pairs were counted to tell the two predictors apart.
        """
        counted = [dict(self.counted(f"health/{name}_loss")) for name in ("bigram", "unigram")]
        losses = [dict(self.finite("train/loss")), *counted]
        common = sorted(losses[0].keys() & losses[1].keys() & losses[2].keys())[-5:]  # the same batches
        if len(common) < 2:
            return None
        loss, pairs, single = (statistics.median(each[step] for step in common) for each in losses)
        return (loss - pairs) / (single - pairs) if 0 < pairs < 0.9 * single else None

    @cached_property
    def tokens_per_step(self) -> float | None:
        """The mean number of tokens per step so far; None if the number of tokens was not logged."""
        tokens = self.finite("progress/tokens")
        return tokens[-1][1] / tokens[-1][0] if tokens and tokens[-1][0] else None

    @cached_property
    def passes(self) -> float | None:
        """Passes over the training data so far; None if the size of the data is not known."""
        return self.passes_at(self.step)

    def passes_at(self, step: int) -> float | None:
        """Return the passes over the training data in `step` steps; None if the size of the data is not known."""
        tokens, size = self.tokens_per_step, self.last("setup/train_tokens", 0.0)
        return None if tokens is None or not size else tokens * step / size


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from YAML is a finite number. true and false do not count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def medians(values: Sequence[float], parts: int) -> list[float]:
    """Cut `values` into `parts` consecutive parts of about the same length, and return the median of each part."""
    return [statistics.median(values[len(values) * i // parts : len(values) * (i + 1) // parts]) for i in range(parts)]


def _enough(rows: list[Row], tag: str, least: int) -> list[Row]:
    if len(rows) < least:
        raise Unjudged(tag)
    return rows
