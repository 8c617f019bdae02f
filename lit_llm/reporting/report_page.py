"""The HTML page of `report` about one run, and charts that the page of several runs has, too."""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from html import escape
from typing import NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import count, duration, size
from lit_llm.reporting.charts import COLORS, Line, Points, chart
from lit_llm.reporting.doctor.diagnose import diagnose, observed
from lit_llm.reporting.health_charts import health_charts
from lit_llm.reporting.ranking import BITS, TRAINING, VALIDATION, Setting, figures
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.reporting.setting_texts import settings_of, text
from lit_llm.reporting.summary import described
from lit_llm.reporting.time_spent import time_figure, time_spent
from lit_llm.runs.curve import versions_text
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.run_folder import CONFIG

SAMPLES = 6
"""The page shows the generated text samples of the newest SAMPLES steps that have samples."""
PLANNED = (
    "Planned → measured, for each launch. – is not known. On a CPU, the measured memory is that of the whole process, with "
    "Python and its libraries."
)


class Quantity(NamedTuple):
    """Description of a chart of logged curves. `tags`: {name of a curve: name of its line}. `robust`: cut off outliers."""

    title: str
    tags: dict[str, str]
    robust: bool = False
    unit: str = ""
    from_zero: bool = True


_BOTH = {"train": "training", "val": "validation"}
_PREFERENCES = (
    Quantity(
        "Margin: reward of the chosen minus the rejected answer", {f"{split}/margin": said for split, said in _BOTH.items()}
    ),
    Quantity("Accuracy: pairs whose margin is positive", {f"{split}/accuracy": said for split, said in _BOTH.items()}),
    Quantity(
        "Rewards",
        {f"{split}/reward_{answer}": f"{answer}, {said}" for split, said in _BOTH.items() for answer in ("chosen", "rejected")},
    ),
    Quantity("KL from the reference", {f"{split}/kl": said for split, said in _BOTH.items()}, unit="nats per token"),
)
_QUANTITIES = (
    Quantity("Learning rate", {"lr": ""}),
    Quantity("Gradient norm", {"grad/norm": "", "grad/norm_clipped": "after clipping"}, robust=True),
    Quantity("Tokens per second", {"throughput/tokens_per_second": ""}),
    Quantity("Share of the time that steps wait for data", {"time/data_fraction": ""}),
    Quantity("Peak memory, GB", {"memory/peak_gb": "", "plan/peak_gb": "planned"}),
)
_MOST_CHARTS = 12
"""The most data sources whose losses are drawn, and the most charts of curves that no other chart shows."""


def report_page(run: RunCurves, command: str, recorded: CurveFollower | None = None) -> str:
    """Return the whole HTML page of one run.

    Args:
        command: the command that made the page.
        recorded: the recorded loss curve with which the run is compared, and its tolerance. None: no comparison.
    """
    body = [html.keys(_keys(run)), html.pairs(described(run)), *(f"<p>{escape(said)}</p>" for said in missing(run))]
    body += _findings(run)
    loss, *others = charts([Setting((run,), None, None, (run.name,))], recorded)
    body.append(html.columns([loss, *samples(run, "Samples"), *others, *health_charts(run)]))
    if recorded is not None:
        body += [html.heading("Against the recorded curve"), html.pairs([(run.name, _compared(run, recorded))])]
    body += _planned(run)
    settings = [(key, text(value)) for key, value in sorted(settings_of(run).items())]
    body += [html.heading("Settings"), html.table(["setting", "value"], settings, summary="all settings")]
    environment = html.pairs([(run.name, run.environment)]) if run.launches else "<p>Not recorded.</p>"
    body += [html.heading("Environment"), environment]
    return html.document(f"Report: {run.name}", body, command)


def charts(settings: Sequence[Setting], recorded: CurveFollower | None = None) -> list[tuple[str, str]]:
    """Return (title, HTML of the chart) of every quantity that a run has logged, over steps. The first chart is the loss, also
    over tokens and time, with the curve of `recorded` if given; the last shows the share of time of each part of a step.
    """
    runs = [run for setting in settings for run in setting.runs]
    pairs = [("Loss", _loss(settings, recorded))]
    # On a CPU, measured memory is that of the whole process, which is not planned.
    on_cpu = any("resident_bytes" in launch["measured"] for run in runs for launch in run.launches)
    for quantity in _quantities(runs):
        tags = {tag: said for tag, said in quantity.tags.items() if tag != "plan/peak_gb" or not on_cpu}
        lines = list(_lines(settings, tags, RunCurves.over_steps))
        if lines:
            wide = "lr" in tags and _wide(lines)
            dashed = [f"dashed: {tags[tag]}" for tag in _DASHED if tag in tags and len(runs) > 1]
            drawn = chart(
                lines,
                label=quantity.title,
                unit="logarithmic" if wide else quantity.unit or "".join(dashed),
                x_name="steps",
                text_of_x=count,
                high=_without_outliers(lines) if quantity.robust else None,
                from_zero=quantity.from_zero and not wide,
                logarithmic=wide,
            )
            pairs.append((quantity.title, drawn))
    spent = [(run.name, parts) for setting in settings if (parts := time_spent(run := setting.runs[0])) is not None]
    return [*pairs, ("Where the time went", time_figure(spent))] if spent else pairs


def _quantities(runs: Sequence[RunCurves]) -> Iterator[Quantity]:
    """Yield the charts that `runs` may have: of preference tuning, of losses by data source, of curves such as the learning
    rate, and, if no run has a curve train/loss or val/loss, of each other logged curve.
    """
    tags = list(dict.fromkeys(tag for run in runs for tag in run.run.scalars))
    yield from _PREFERENCES
    if len(runs) > 1:
        yield Quantity("Bits per byte", {BITS: ""}, from_zero=False)
    for split, name in _BOTH.items():
        sources = {tag: match[1] for tag in tags if (match := re.fullmatch(f"{split}/([^/]+)/loss", tag))}
        shown = dict(list(sources.items())[:_MOST_CHARTS])
        title, unit = f"{name.capitalize()} loss by source", "nats per token"
        if len(runs) == 1:
            yield Quantity(title, shown, robust=True, unit=unit, from_zero=False)
        elif split == "val":
            yield from (Quantity(f"{title}: {said}", {tag: ""}, unit=unit, from_zero=False) for tag, said in shown.items())
    yield from _QUANTITIES
    if not {TRAINING, VALIDATION} & set(tags):
        known = {tag for quantity in _QUANTITIES for tag in quantity.tags}
        yield from (Quantity(tag, {tag: ""}) for tag in [tag for tag in tags if tag not in known][:_MOST_CHARTS])


def missing(run: RunCurves) -> Iterator[str]:
    """Yield a sentence for each part of the page that cannot be shown, with the reason."""
    if not run.run.scalars:
        yield (
            f"{run.name} has logged nothing: it has not reached its first row, or ran without a logger (trainer.logger=false)."
        )
    elif run.last("train/loss") is None and run.last("val/loss") is None:
        yield f"{run.name} has neither train/loss nor val/loss. It logged {', '.join(run.run.scalars)}."
    elif run.last("val/loss") is None:
        yield f"{run.name} has no validation loss yet."
    for said in run.run.unread:
        yield f"{run.name}: {said}."
    if not run.launches:
        yield (
            f"{run.name} has no plan.json that can be read: versions, hardware and plan are not known, and times include "
            "pauses."
        )
    if not run.run.config:
        yield f"{run.name} has no {CONFIG}: its settings are not known."
    if not run.run.checkpoints:
        yield f"{run.name} has no checkpoint."


def _findings(run: RunCurves) -> list[str]:
    """Return the heading and the table of `doctor`'s findings about the run; [] without findings."""
    findings = diagnose(observed(run.run))
    if not findings:
        return []
    rows = [
        [each.rule.severity.name.lower(), each.name, each.seen, f"{each.rule.cause} ({each.rule.sure})", each.rule.change]
        for each in findings
    ]
    head = ["", "finding", "seen", "likely cause", "change"]
    return [html.heading("Findings"), html.table(head, rows, kind="texts")]


def _keys(run: RunCurves) -> list[tuple[str, str, str]]:
    entries = [(name, text, "") for name, text in figures(run).items() if text != "–"]
    parameters = run.launches[-1]["parameters"] if run.launches else None
    return [*([("parameters", count(parameters), "")] if parameters else []), *entries]


def _loss(settings: Sequence[Setting], recorded: CurveFollower | None) -> str:
    tags = {TRAINING: "training", VALIDATION: "validation"}
    runs = [run for setting in settings for run in setting.runs]
    longest = max(run.seconds for run in runs)
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    seconds, unit = next((unit for unit in units if longest > 2 * unit[0]), units[-1])  # so that times are small numbers
    parts = []
    for name, over, scale in (
        ("steps", RunCurves.over_steps, 1.0),
        ("tokens", RunCurves.over_tokens, 1.0),
        *([(unit, RunCurves.over_time, seconds)] if longest else []),  # a CSVLogger writes no times
    ):
        lines = [line._replace(points=[(x / scale, y) for x, y in line.points]) for line in _lines(settings, tags, over)]
        if recorded is not None and name == "steps":
            points = [(float(row.step), row.loss) for row in recorded.reference.rows if row.loss is not None]
            lines.append(Line("recorded curve: training", 8, points, "dashed"))
        if lines:
            high = _without_outliers(lines)
            # The first training loss is that of the initial weights, also of a run that diverges to millions.
            first = [y for run in runs for _, y in run.over_steps(TRAINING)[:1] if math.isfinite(y)]
            high = min(high, 2 * max(first)) if high is not None and first and max(first) > 0 else high
            said = [_unit(runs), "lines: training, dots: validation" if len(runs) > 1 else ""]
            said += ["thin: seeds, thick: their mean" if len(runs) > len(settings) else ""]
            drawn = chart(lines, label="Loss", unit="; ".join(filter(None, said)), x_name=name, text_of_x=count, high=high)
            parts.append((name, drawn))
    return html.tabs("loss-" + runs[0].name, parts) if parts else "<p>No loss was logged.</p>"


def _unit(runs: Sequence[RunCurves]) -> str:
    """Return the loss's unit: "mean per pair" if margins were logged, "nats per token" if a perplexity was logged, else ""."""
    logged = {tag for run in runs for tag in run.run.scalars}
    if logged & {"train/margin", "val/margin"}:
        return "mean per pair"
    return "nats per token" if logged & {"train/perplexity", "val/perplexity"} else ""


_DASHED = ("grad/norm_clipped", "plan/peak_gb")


def _lines(settings: Sequence[Setting], tags: dict[str, str], over: Callable[[RunCurves, str], Points]) -> Iterator[Line]:
    """Yield a line for each run and each of its logged curves in `tags` ({name of the curve: name of the line}).

    `over(run, tag)` returns the points of a line. With one run, each curve has a colour; with several, each group of runs
    (`Setting`). If a group has several runs, their lines are thin, and a thick line is the mean over the runs, at the x values
    that all runs of the group have.
    """
    many = len(settings) > 1 or len(settings[0].runs) > 1
    for i, setting in enumerate(settings):
        thin = len(setting.runs) > 1
        for j, (tag, said) in enumerate(tags.items()):
            curves = [(run.name if thin else setting.name, points) for run in setting.runs if (points := over(run, tag))]
            kind = "dots" if tag.startswith("val/") else "dashed" if tag in _DASHED else ""
            color = COLORS[(i if many else j) % len(COLORS)]
            mean = _mean([points for _, points in curves]) if thin and len(curves) > 1 else []
            lines = [(name, points, "thin" if thin else kind) for name, points in curves]
            for name, points, drawn in [*lines, *([(f"mean of {setting.name}", mean, kind)] if mean else [])]:
                shown = (f"{name}: {said}" if said else name) if many else said or "logged"
                group = setting.name if many and (thin or len(tags) > 1) else ""
                yield Line(shown, color, points, drawn, group)


def _mean(curves: Sequence[Points]) -> Points:
    """Return the pointwise mean of the curves, at the x values that all curves have."""
    values = [dict(points) for points in curves]
    common = sorted(set.intersection(*(set(each) for each in values)))
    return [(x, statistics.fmean(each[x] for each in values)) for x in common]


def _wide(lines: Sequence[Line]) -> bool:
    """Whether the maxima of the lines differ by more than a factor of ten: a linear axis would flatten the lower ones."""
    peaks = [max((y for _, y in line.points if math.isfinite(y)), default=0.0) for line in lines]
    above = [peak for peak in peaks if peak > 0]
    return len(above) > 1 and max(above) > 10 * min(above)


def _without_outliers(lines: Sequence[Line]) -> float | None:
    """Return the value above which lines are cut off: twice the largest of the lines' first values and 95 % quantiles; None if
    this value is not above 0.
    """
    bounds = []
    for line in lines:
        values = [y for _, y in line.points if math.isfinite(y)]
        if values:
            bounds.append(max(values[0], sorted(values)[int(0.95 * (len(values) - 1))]))
    return 2 * max(bounds) if bounds and max(bounds) > 0 else None


def _compared(run: RunCurves, recorded: CurveFollower) -> str:
    versions = versions_text(run.launches[-1]["versions"]) if run.launches else ""
    follower = CurveFollower(recorded.reference, recorded.curve_name, recorded.tolerance, versions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sentence is in the page
        follower.catch_up(run.run.curve, run.step)
    return follower.summary()


def _planned(run: RunCurves) -> list[str]:
    rows = []
    for launch in run.launches:
        measured = {"peak_bytes": launch["measured"].get("resident_bytes"), **launch["measured"]}
        figures = {"peak_bytes": size, "step_seconds": duration, "tokens_per_second": count}
        pairs = [_pair(launch["predicted"].get(key), measured.get(key), shown) for key, shown in figures.items()]
        started = datetime.fromisoformat(launch["started"])
        rows.append([f"{started:%Y-%m-%d %H:%M %Z}", f"{launch['first_step']:,}", *pairs])
    if not rows:
        return []
    head = ["started", "from step", "peak memory", "a step", "tokens per second"]
    return [html.heading("Planned and measured"), f"<p>{escape(PLANNED)}</p>", html.table(head, rows, kind="figures")]


def _pair(planned: float | None, measured: float | None, shown: Callable[[float], str]) -> str:
    return " → ".join("–" if value is None else shown(value).partition(" (")[0] for value in (planned, measured))


def samples(run: RunCurves, title: str) -> list[tuple[str, str]]:
    """Return [(title, HTML)] with the newest sample of each prompt, and samples of earlier steps folded; [] without samples."""
    parts = []
    for tag, texts in run.run.texts.items():
        if tag.startswith("samples/"):
            # The callback TextSamples indents the texts, for TensorBoard.
            shown = [
                (step, html.preformatted(re.sub("^    ", "", text, flags=re.MULTILINE))) for step, text in texts[-SAMPLES:]
            ]
            *earlier, last = [f"<p>{escape(tag)}, step {step:,}</p>{text}" for step, text in shown]
            parts.append(last)
            if earlier:
                summary = f"{len(earlier)} earlier"
                parts.append(f"<details><summary>{summary}</summary>{''.join(reversed(earlier))}</details>")
    return [(title, "".join(parts))] if parts else []
