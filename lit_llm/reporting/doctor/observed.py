"""What the rules may ask about a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_llm.runs.loaded_run import Series, setting_in

Points = list[tuple[int, float]]
"""(optimizer step, value), by step."""


@dataclass(frozen=True)
class Observed:
    """A run as the rules see it: numbers by tag, settings, and where it was resumed.

    Attributes:
        scalars: logged numbers by tag.
        config: the settings of config.yaml; none for a run that has none.
        first_steps: complete steps at the start of each launch, oldest first.
        damages: a sentence for each file of the training data that is not what was written.
        question: whether the run's chat template writes the user's question, and whether it has it learned. None without one.
    """

    scalars: Mapping[str, Series]
    config: Mapping[str, Any] = field(default_factory=dict)
    first_steps: Sequence[int] = ()
    damages: Sequence[str] = ()
    question: tuple[bool, bool] | None = None

    def points(self, tag: str) -> Points:
        """Every value of a tag, also NaN and infinity."""
        series = self.scalars.get(tag)
        return [] if series is None else list(zip(series.steps, series.values, strict=True))

    def finite(self, tag: str) -> Points:
        return [(step, value) for step, value in self.points(tag) if math.isfinite(value)]

    def values(self, tag: str, after: int = 0) -> list[float]:
        """Finite values of a tag at steps above `after`."""
        return [value for step, value in self.finite(tag) if step > after]

    def last(self, tag: str) -> float | None:
        """The last finite value."""
        found = self.finite(tag)
        return found[-1][1] if found else None

    def at_first(self, tag: str) -> float | None:
        """The finite value at step 1."""
        return dict(self.finite(tag)).get(1)

    def counted(self, tag: str) -> Points:
        """Finite values of a loss of counted tokens, in rows before which a launch had counted enough to tell the two apart.

        Rows of one token in a vocabulary of V each need as many counts as V; 30 V were enough for texts of 256 to 1,024 tokens.
        """
        enough, size = dict(self.finite("health/counted_pairs")), self.last("setup/vocab_size") or 0.0
        return [(step, value) for step, value in self.finite(tag) if step > 1 and enough.get(step, math.inf) >= 30 * size]

    def recent(self, tag: str) -> float | None:
        """The median of the last five of them: a row may be of few tokens. None of less than two."""
        found = [value for _, value in self.counted(tag)[-5:]]
        return statistics.median(found) if len(found) > 1 else None

    def median(self, tag: str, after: int = 0) -> float | None:
        """The median of the finite values at steps above `after`."""
        found = self.values(tag, after)
        return statistics.median(found) if found else None

    def by_layer(self, group: str) -> dict[str, Points]:
        """The finite values of `health/GROUP/LAYER`, by layer."""
        prefix = f"health/{group}/"
        return {tag.removeprefix(prefix): self.finite(tag) for tag in self.scalars if tag.startswith(prefix)}

    def total(self, group: str) -> Points:
        """The root of the sum over layers of the squares of `health/GROUP/LAYER`, by step."""
        squares: dict[int, float] = {}
        for points in self.by_layer(group).values():
            for step, value in points:
                squares[step] = squares.get(step, 0.0) + value * value  # `value**2` raises beyond 1e154
        return [(step, math.sqrt(square)) for step, square in sorted(squares.items())]

    def smoothed(self, tag: str) -> Points:
        """Medians of five neighbouring finite values, the first four left out."""
        found = self.finite(tag)
        return [(found[i][0], statistics.median(value for _, value in found[i - 4 : i + 1])) for i in range(4, len(found))]

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting by its dotted key; `default` if a part of it is missing or null."""
        value = setting_in(self.config, key)
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """A setting that is a finite number; None of any other."""
        value = self.setting(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
        return value if is_number else None

    @property
    def drops(self) -> bool:
        """Whether settings ask for dropout in training."""
        return bool(self.setting("model.dropout") or self.setting("lora.dropout"))

    @property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.scalars.values() if series.steps), default=0)

    def start_of_launch(self, step: int) -> int:
        """Complete steps at the start of the launch that made a step."""
        return next((first for first in reversed(self.first_steps) if first < step), 0)

    @property
    def planned_steps(self) -> int | None:
        """Steps that the run is to make; None if its end is not a number of steps."""
        planned = self.number("trainer.max_steps")
        return int(planned) if planned is not None and planned > 0 else None

    @property
    def is_readable(self) -> bool:
        """Whether some curve has a name that rules read."""
        return any(tag.partition("/")[0] in ("train", "val", "health", "grad") or tag == "lr" for tag in self.scalars)

    @property
    def is_complete(self) -> bool:
        """Whether nearly all planned steps are made; true if it is not known how many."""
        return self.planned_steps is None or self.step >= 0.9 * self.planned_steps

    @property
    def warmup_steps(self) -> int:
        """The step at which the learning rate reaches nine tenths of its highest value; 0 if it was not logged."""
        rates = self.finite("lr")
        highest = max((rate for _, rate in rates), default=0.0)
        return next((step for step, rate in rates if rate >= 0.9 * highest), 0)

    @property
    def from_scratch(self) -> bool:
        """Whether training started from random weights, by the settings. Without settings it is not known, and false."""
        return "init_from" in self.config and self.setting("init_from") is None and self.setting("lora") is None

    @property
    def uniform_loss(self) -> float | None:
        """ln(vocabulary): the loss of a model that knows nothing. None if the vocabulary is not known."""
        size = self.last("setup/vocab_size")
        return None if size is None or size < 2 else math.log(size)

    @property
    def behind_pairs(self) -> float | None:
        """Where the training loss is between that of counted pairs of tokens, 0, and that of counted tokens, 1.

        None if they are not known, or too few pairs were counted to tell the two apart.
        """
        counted = [dict(self.counted(f"health/{name}_loss")) for name in ("bigram", "unigram")]
        losses = [dict(self.finite("train/loss")), *counted]
        common = sorted(losses[0].keys() & losses[1].keys() & losses[2].keys())[-5:]  # the same batches
        if len(common) < 2:
            return None
        loss, pairs, single = (statistics.median(each[step] for step in common) for each in losses)
        return (loss - pairs) / (single - pairs) if 0 < pairs < 0.9 * single else None

    @property
    def tokens_per_step(self) -> float | None:
        """The mean so far; None if it was not logged."""
        tokens = self.finite("progress/tokens")
        return tokens[-1][1] / tokens[-1][0] if tokens and tokens[-1][0] else None

    @property
    def passes(self) -> float | None:
        """Passes over the training data so far; None if the size of the data is not known."""
        return self.passes_at(self.step)

    def passes_at(self, step: int) -> float | None:
        """The same after `step` steps."""
        tokens, size = self.tokens_per_step, self.last("setup/train_tokens")
        return None if tokens is None or not size else tokens * step / size
