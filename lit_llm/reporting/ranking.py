"""Rank runs by their last losses, averaged over runs that differ by their seeds alone, and format the main figures of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lit_llm.core.number_text import count, duration, size
from lit_llm.reporting.charts import number
from lit_llm.reporting.run_curves import TOKENS, Launch, RunCurves
from lit_llm.reporting.setting_texts import ABSENT, exact, settings_of, varying_settings
from lit_llm.reporting.summary import short_cost
from lit_llm.runs.lock import sign_of_life

SEEDS = ("seed_everything", "data.seed")
"""Keys of the settings that are random seeds."""
BITS, VALIDATION, TRAINING = "val/bits_per_byte", "val/loss", "train/loss"


class Setting(NamedTuple):
    """Record of a group of runs that differ by their seeds alone: one place of a ranking.

    Args:
        runs: the runs of the group; of runs with equal curves, only one.
        value: the mean over `runs` of the last value of the ranking's curve (a loss). None: no run has a finite value, and the
            group is unranked.
        spread: the sample standard deviation of these last values. None: fewer than two runs have a value.
        names: the names of all runs of the group, also of runs that are left out of `runs`.
    """

    runs: tuple[RunCurves, ...]
    value: float | None
    spread: float | None
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The names of at most three runs of the group, and the number of further runs: "a, b, c and 2 more"."""
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return ", ".join(self.names[:3]) + more

    def said(self) -> str:
        """Return `value` with `spread` as text, like "1.2345 ± 0.0012"; "–" without a value."""
        spread = "" if self.spread is None else f" ± {self.spread:.2g}"
        return "–" if self.value is None else f"{self.value:.4f}{spread}"


def ranked(runs: Sequence[RunCurves]) -> tuple[str | None, list[Setting]]:
    """Return (name of the curve by which runs are ranked, groups of runs with the lowest mean last value of this curve first).

    The curve is bits per byte if each run with a validation loss has logged bits per byte, which alone can compare runs with
    different tokenizers. Otherwise the curve is the validation loss or, if no run has a validation loss, the training loss.
    Runs that stopped before their last step follow the complete runs, each as its own group. Runs without a value are last.
    """
    having = {tag: {run.name for run in runs if run.last(tag) is not None} for tag in (BITS, VALIDATION, TRAINING)}
    if having[BITS] and having[BITS] >= having[VALIDATION]:
        tag: str | None = BITS
    else:
        tag = next((tag for tag in (VALIDATION, TRAINING) if having[tag]), None)
    settings = [settings_of(run) for run in runs]
    varying = varying_settings(settings)
    values = [tuple(exact(own.get(key, ABSENT)) for key in varying) for own in settings]
    joined: dict[tuple[str, ...], list[RunCurves]] = {}
    for i, run in enumerate(runs):
        alone = run.name if stopped(run) or _value(run, tag) is None or not settings[i] else ""
        # A run with equal settings, also the seed, but another curve joins no group: something else, such as the code, differs.
        twins = [other for other, each in zip(runs[:i], values, strict=False) if each == values[i]]
        again = 0 if any(same_curves(run, other) for other in twins) else len(twins)
        but_seeds = (value for key, value in zip(varying, values[i], strict=True) if key not in SEEDS)
        joined.setdefault((*but_seeds, alone, str(again)), []).append(run)
    entries = [_setting(each, tag) for each in joined.values()]
    return tag, sorted(entries, key=lambda s: (s.value is None, bool(stopped(s.runs[0])), s.value or 0.0))


def _setting(runs: Sequence[RunCurves], tag: str | None) -> Setting:
    once = [run for i, run in enumerate(runs) if not any(same_curves(run, other) for other in runs[:i])]
    values = [value for run in once if (value := _value(run, tag)) is not None]
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Setting(tuple(once), statistics.fmean(values) if values else None, spread, tuple(run.name for run in runs))


def _value(run: RunCurves, tag: str | None) -> float | None:
    value = None if tag is None or diverged(run) else run.last(tag)
    return value if value is not None and math.isfinite(value) else None


def same_curves(one: RunCurves, other: RunCurves) -> bool:
    """Whether both runs logged the same training and validation losses at the same steps, and at least one loss."""
    pairs = [(one.over_steps(tag), other.over_steps(tag)) for tag in (TRAINING, VALIDATION)]
    return all(first == second for first, second in pairs) and any(first for first, _ in pairs)


def stopped(run: RunCurves) -> str:
    """Return why a run did not reach its last step, as a sentence without its subject (the run); "" if the run is complete."""
    if not run.run.scalars:
        return "has logged nothing"
    if diverged(run):
        losses = run.over_steps("train/loss")
        finite = [i for i, (_, loss) in enumerate(losses) if math.isfinite(loss)]
        first = losses[finite[-1] + 1 if finite else 0][0]
        return f"diverged: its training loss is {losses[-1][1]}, and not finite from step {first:,.0f} on"
    ended, steps = run.end, last_step(run)
    if (ended is not None and ended["complete"]) or (steps is not None and run.step >= steps):
        return ""
    why = ended["ended"] if ended else sign_of_life(run.run.path) or "it runs, was stopped, or died"
    if steps is not None:
        return f"has {run.step:,} of {steps:,} steps: {why}"
    if ended is not None:
        return f"has {run.step:,} steps: {why}"
    return "has no known end, because trainer.max_steps is not set: it may run, be complete, or have died"


def diverged(run: RunCurves) -> bool:
    """Whether the last logged training loss of the run is NaN or infinite."""
    loss = run.last(TRAINING)
    return loss is not None and not math.isfinite(loss)


def last_step(run: RunCurves) -> int | None:
    """Return the last step of the run by its settings (trainer.max_steps); None if the settings have no number of steps."""
    steps = run.run.setting("trainer.max_steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def csv_rows(runs: Sequence[RunCurves]) -> list[list[Any]]:
    """Return a row of names, then a row for each run: size, training FLOPs, last losses, differing settings; None: unknown."""
    settings, losses = [settings_of(run) for run in runs], (TRAINING, VALIDATION, BITS)
    varying = varying_settings(settings)
    rows: list[list[Any]] = [["run", "parameters", "tokens", "flops", "steps", "complete", *losses, *varying]]
    for run, own in zip(runs, settings, strict=True):
        last: Launch = run.launches[-1] if run.launches else {}
        tokens, each = run.last(TOKENS), last.get("flops_per_token")
        flops = None if tokens is None or each is None else tokens * each
        row = [run.name, last.get("parameters"), tokens, flops, run.step, not stopped(run), *map(run.last, losses)]
        rows.append(row + [own.get(key) for key in varying])
    return rows


def figures(run: RunCurves) -> dict[str, str]:
    """Return {name: text} of the most important figures of a run; the text is "–" if the run has not logged the figure."""

    def shown(tag: str, text: Callable[[float], str]) -> str:
        value = run.last(tag)
        return "–" if value is None else text(value) if math.isfinite(value) else str(value)

    steps = last_step(run)
    peak = max(run.series("memory/peak_gb").values, default=None)  # each launch measures its own peak
    ended_before = steps is not None and run.step < steps and not stopped(run)
    return {
        "validation loss": shown(VALIDATION, lambda v: f"{v:.4f}"),
        "bits per byte": shown(BITS, lambda v: f"{v:.4f}"),
        "training loss": shown(TRAINING, lambda v: f"{v:.4f}"),
        **{name: shown(f"val/{name.lower()}", number) for name in ("margin", "accuracy", "KL")},
        "steps": f"{run.step:,}" if steps is None or ended_before else f"{run.step:,} of {steps:,}",
        "tokens": shown(TOKENS, count),
        "time": duration(run.seconds) if run.seconds else "–",
        "tokens per second": shown("throughput/tokens_per_second", count),
        "peak memory": "–" if peak is None else size(peak * 1e9).partition(" (")[0],
        "cost": short_cost(run.launches) or "–",
    }
