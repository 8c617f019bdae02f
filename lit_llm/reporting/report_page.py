"""The page of `report`: one run, or several beside each other."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import count, duration, size
from lit_llm.reporting.charts import COLORS, Line, chart
from lit_llm.reporting.doctor.diagnose import diagnose, observed
from lit_llm.reporting.evidence import Evidence
from lit_llm.reporting.health_charts import health_charts
from lit_llm.reporting.ranking import figures, ranked
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.reporting.summary import described
from lit_llm.reporting.time_spent import time_figure, time_spent
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.run_folder import CONFIG

MOST_RUNS = len(COLORS)
SAMPLES = 6
"""Steps of which samples are shown, the newest."""
PLANNED = (
    "Planned → measured, for each launch. – is not known. On a CPU, the measured memory is that of the whole process, with "
    "Python and its libraries."
)


class Quantity(NamedTuple):
    """A chart: tags and what each line is called. `robust`: single high values are cut off."""

    title: str
    tags: dict[str, str]
    robust: bool = False


QUANTITIES = (
    Quantity("Learning rate", {"lr": ""}),
    Quantity("Gradient norm", {"grad/norm": "", "grad/norm_clipped": "after clipping"}, robust=True),
    Quantity("Tokens per second", {"throughput/tokens_per_second": ""}),
    Quantity("Share of the time that steps wait for data", {"time/data_fraction": ""}),
    Quantity("Peak memory, GB", {"memory/peak_gb": "", "plan/peak_gb": "planned"}),
)


def report_page(runs: Sequence[RunCurves], command: str, recorded: Sequence[Evidence | None] = ()) -> str:
    """The page of one run, or of several that are compared.

    Args:
        command: that made it.
        recorded: for each run, the earlier curve with which it is compared.
    """
    body = [html.keys(_keys(runs[0])) if len(runs) == 1 else _ranking(runs), *_described(runs)]
    body += [f"<p>{escape(said)}</p>" for run in runs for said in missing(run)]
    body += [part for run in runs for part in _findings(run, titled=len(runs) > 1)]
    body += charts(runs, [each.follower for each in recorded if each is not None and each.follower is not None])
    compared = [(run.name, _compared(run, each)) for run, each in zip(runs, recorded, strict=False) if each is not None]
    if compared:
        body += [html.heading("Against the recorded curve"), html.pairs(compared)]
    body += _planned(runs)
    body += [part for run in runs for part in _samples(run, titled=len(runs) > 1)]
    environments = [(run.name, run.launches[-1].environment) for run in runs if run.launches]
    body += [html.heading("Settings"), _settings(runs), html.heading("Environment")]
    body.append(html.pairs(environments) if environments else "<p>Not recorded.</p>")
    return html.document(f"Report: {', '.join(run.name for run in runs)}", body, command)


def charts(runs: Sequence[RunCurves], recorded: Sequence[CurveFollower] = ()) -> list[str]:
    """Every quantity that a run has logged, over steps; the loss also over tokens and time; and where the time went."""
    body = [html.heading("Loss"), _loss(runs, recorded)]
    # On a CPU, measured memory is that of the whole process, which is not planned.
    on_cpu = any("resident_bytes" in launch.measured for run in runs for launch in run.launches)
    for quantity in QUANTITIES:
        tags = {tag: said for tag, said in quantity.tags.items() if tag != "plan/peak_gb" or not on_cpu}
        lines = list(_lines(runs, tags, RunCurves.over_steps))
        if lines:
            wide = "lr" in tags and _wide(lines)
            dashed = [f"dashed: {said}" for said in tags.values() if said and len(runs) > 1]
            drawn = chart(
                lines,
                label=quantity.title,
                unit="logarithmic" if wide else "".join(dashed),
                x_name="steps",
                text_of_x=count,
                high=_without_outliers(lines) if quantity.robust else None,
                from_zero=not wide,
                logarithmic=wide,
            )
            body += [html.heading(quantity.title), drawn]
    spent = [(run.name, found) for run in runs if (found := time_spent(run)) is not None]
    if spent:
        body += [html.heading("Where the time went"), time_figure(spent)]
    if len(runs) == 1:
        body += health_charts(runs[0])
    return body


def missing(run: RunCurves) -> Iterator[str]:
    """One sentence for each part that the page cannot show, and why."""
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


def _findings(run: RunCurves, *, titled: bool) -> list[str]:
    """What `doctor` says of the run; nothing if it finds nothing."""
    found = diagnose(observed(run.run))
    if not found:
        return []
    rows = [
        [each.rule.severity.name.lower(), each.name, each.seen, f"{each.rule.cause} ({each.rule.sure})", each.rule.change]
        for each in found
    ]
    head = ["", "finding", "seen", "likely cause", "change"]
    return [html.heading("Findings" + (f": {run.name}" if titled else "")), html.table(head, rows, kind="texts")]


def _keys(run: RunCurves) -> list[tuple[str, str, str]]:
    found = [(name, text, "") for name, text in figures(run).items() if text != "–"]
    parameters = run.launches[-1].parameters if run.launches else None
    return [*([("parameters", count(parameters), "")] if parameters else []), *found]


def _described(runs: Sequence[RunCurves]) -> list[str]:
    """Model, data and cost; once, if all runs have the same."""
    said: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for name, text in described(run):
            said.setdefault((name, text), []).append(run.name)
    order = list(dict.fromkeys(name for name, _ in said))
    rows = sorted(said.items(), key=lambda item: order.index(item[0][0]))
    return [html.pairs([(name if len(of) == len(runs) else f"{name} of {', '.join(of)}", text) for (name, text), of in rows])]


def _ranking(runs: Sequence[RunCurves]) -> str:
    tag, places = ranked(runs)
    if tag is None:
        return "<p>No run has logged a loss.</p>"
    shown = {run.name: figures(run) for run in runs}
    names = [name for name in shown[runs[0].name] if any(each[name] != "–" for each in shown.values())]
    rows = []
    for i, place in enumerate(places, 1):
        values = [shown[place.run.name][name] for name in names]
        rows.append(["–" if place.value is None else str(i), place.run.name, *values])
    return f"<p>Ordered by the last {tag}.</p>" + html.table(["", "run", *names], rows, kind="figures")


def _loss(runs: Sequence[RunCurves], recorded: Sequence[CurveFollower]) -> str:
    tags = {"train/loss": "training", "val/loss": "validation"}
    longest = max(run.seconds for run in runs)
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    seconds, unit = next((unit for unit in units if longest > 2 * unit[0]), units[-1])  # so that times are small numbers
    parts = []
    for name, over, scale in (
        ("steps", RunCurves.over_steps, 1.0),
        ("tokens", RunCurves.over_tokens, 1.0),
        (unit, RunCurves.over_time, seconds),
    ):
        lines = [line._replace(points=[(x / scale, y) for x, y in line.points]) for line in _lines(runs, tags, over)]
        for curve in {each.curve_name: each for each in recorded}.values() if name == "steps" else ():
            points = [(float(row.step), row.loss) for row in curve.reference.rows if row.loss is not None]
            lines.append(Line("recorded curve: training", 8, points, "dashed"))
        if lines:
            high = _without_outliers(lines)
            # The first training loss is that of the initial weights, also of a run that diverges to millions.
            first = [y for run in runs for _, y in run.over_steps("train/loss")[:1] if math.isfinite(y)]
            high = min(high, 2 * max(first)) if high is not None and first and max(first) > 0 else high
            said = "nats per token" + ("; lines: training, dots: validation" if len(runs) > 1 else "")
            drawn = chart(lines, label="Loss", unit=said, x_name=name, text_of_x=count, high=high)
            parts.append((name, drawn))
    return html.tabs("loss", parts) if parts else "<p>No loss was logged.</p>"


def _lines(runs: Sequence[RunCurves], tags: dict[str, str], over: Callable[[RunCurves, str], Any]) -> Iterator[Line]:
    """A line for each run and tag with values. One run has a colour for each tag, several have one for each run."""
    for i, run in enumerate(runs):
        for j, (tag, said) in enumerate(tags.items()):
            points = over(run, tag)
            if points:
                name = (f"{run.name}: {said}" if said else run.name) if len(runs) > 1 else said or "logged"
                kind = "dots" if tag.startswith("val/") else "dashed" if j else ""
                group = run.name if len(runs) > 1 and len(tags) > 1 else ""
                yield Line(name, COLORS[i if len(runs) > 1 else j], points, kind, group)


def _wide(lines: Sequence[Line]) -> bool:
    """Whether the highest values of the lines differ by more than a factor of ten, so that one axis from 0 hides some."""
    peaks = [max((y for _, y in line.points if math.isfinite(y)), default=0.0) for line in lines]
    above = [peak for peak in peaks if peak > 0]
    return len(above) > 1 and max(above) > 10 * min(above)


def _without_outliers(lines: Sequence[Line]) -> float | None:
    """Twice the highest of each line's first value and of the value that a twentieth of its values exceed.

    None: this is not above 0.
    """
    found = []
    for line in lines:
        values = [y for _, y in line.points if math.isfinite(y)]
        if values:
            found.append(max(values[0], sorted(values)[int(0.95 * (len(values) - 1))]))
    return 2 * max(found) if found and max(found) > 0 else None


def _compared(run: RunCurves, recorded: Evidence) -> str:
    if recorded.follower is None:
        return recorded.said
    versions = run.launches[-1].versions if run.launches else ""
    given = recorded.follower
    follower = CurveFollower(given.reference, given.curve_name, given.tolerance, versions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sentence is in the page
        follower.catch_up(run.run.curve, run.step)
    return follower.summary() + recorded.said


def _planned(runs: Sequence[RunCurves]) -> list[str]:
    rows = []
    for run in runs:
        for launch in run.launches:
            memory = launch.measured.get("peak_bytes", launch.measured.get("resident_bytes"))
            rows.append(
                [
                    run.name,
                    f"{launch.started:%Y-%m-%d %H:%M %Z}",
                    f"{launch.first_step:,}",
                    _pair(launch.planned.get("peak_bytes"), memory, size),
                    _pair(launch.planned.get("step_seconds"), launch.measured.get("step_seconds"), duration),
                    _pair(launch.planned.get("tokens_per_second"), launch.measured.get("tokens_per_second"), count),
                ]
            )
    if not rows:
        return []
    head = ["run", "started", "from step", "peak memory", "a step", "tokens per second"]
    return [html.heading("Planned and measured"), f"<p>{escape(PLANNED)}</p>", html.table(head, rows, kind="figures")]


def _pair(planned: float | None, measured: float | None, text: Callable[[float], str]) -> str:
    return " → ".join("–" if value is None else text(value).partition(" (")[0] for value in (planned, measured))


def _samples(run: RunCurves, *, titled: bool) -> list[str]:
    found = []
    for tag, texts in run.run.texts.items():
        if tag.startswith("samples/"):
            for step, text in texts[-SAMPLES:]:
                generated = re.sub("^    ", "", text, flags=re.MULTILINE)  # TextSamples indents it, for TensorBoard
                found.append(f"<p>{escape(tag)}, step {step:,}</p>{html.preformatted(generated)}")
    if not found:
        return []
    return [html.heading("Samples" + (f": {run.name}" if titled else "")), *found]


def _settings(runs: Sequence[RunCurves]) -> str:
    flat = [dict(flattened(run.run.config)) for run in runs]
    keys = sorted({key for each in flat for key in each})
    if len(runs) == 1:
        return html.table(["setting", "value"], [[key, flat[0][key]] for key in keys], summary="all settings")
    rows = [[key, *(each.get(key, "–") for each in flat)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>All runs have the same settings.</p>"
    return html.table(["setting", *(run.name for run in runs)], differing, kind="texts")


def flattened(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value with its dotted key, as text."""
    items = settings.items() if isinstance(settings, dict) else enumerate(settings) if isinstance(settings, list) else None
    if items is None or not settings:
        yield prefix, "null" if settings is None else str(settings).lower() if isinstance(settings, bool) else str(settings)
        return
    for key, value in items:
        yield from flattened(value, f"{prefix}.{key}" if prefix else str(key))
