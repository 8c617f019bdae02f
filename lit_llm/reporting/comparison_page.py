"""The page of `report --compare`: a sweep as a ranking, with the effect of each setting."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeGuard

from lit_llm.config.arguments import leaves
from lit_llm.core import html_page as html
from lit_llm.core.number_text import counted
from lit_llm.reporting.charts import COLORS, Line, chart, number
from lit_llm.reporting.doctor.diagnose import diagnose, observed
from lit_llm.reporting.doctor.finding import Finding
from lit_llm.reporting.evidence import OTHER_CURVES
from lit_llm.reporting.ranking import BITS, RankedRun, diverged, figures, last_step, passes, planned_passes, ranked
from lit_llm.reporting.report_page import charts
from lit_llm.reporting.run_curves import RunCurves, is_number
from lit_llm.reporting.summary import cost
from lit_llm.runs.setting_changes import Change, rule

MOST_COLUMNS, WIDEST = 12, 40
"""Settings that the ranking shows, and the most characters of their values."""
_ABSENT = "–"
_NO_QUANTITIES = ("seed_everything", "data.seed")
"""Numbers whose size means nothing."""
_LENGTHS = ("trainer.max_steps", "trainer.max_epochs")
"""Of runs: a longer one is better anyway."""


def in_order(runs: Sequence[RunCurves]) -> tuple[str | None, list[RankedRun]]:
    """As `ranked`, but runs that did not come to the end that their settings ask for are last."""
    tag, places = ranked(runs)
    return tag, sorted(places, key=lambda place: (place.value is None, bool(stopped(place.run))))


def stopped(run: RunCurves) -> str:
    """What kept a run from its end, as a sentence without its name; "" if nothing did."""
    if not run.run.scalars:
        return "has logged nothing"
    if diverged(run):
        losses = run.over_steps("train/loss")
        finite = [i for i, (_, loss) in enumerate(losses) if math.isfinite(loss)]
        first = losses[finite[-1] + 1 if finite else 0][0]
        return f"diverged: its training loss is {losses[-1][1]}, and not finite from step {first:,.0f} on"
    ended, steps, made, planned = run.end, last_step(run), passes(run), planned_passes(run)
    all_passes = made is not None and planned is not None and made[1] >= planned
    if all_passes or (ended is not None and ended.complete) or (steps is not None and run.step >= steps):
        return ""
    why = "it runs, was stopped, or died" if ended is None else ended.ended
    if steps is not None:
        return f"has {run.step:,} of {steps:,} steps: {why}"
    if made is not None and planned is not None:
        return f"has made {made[0]:.3g} of {planned:g} passes over its data: {why}"
    if ended is not None:
        return f"has {run.step:,} steps: {why}"
    return "has no known end, because trainer.max_steps is not set: it may run, be complete, or have died"


def comparison_page(runs: Sequence[RunCurves], command: str, notes: Sequence[str] = ()) -> str:
    """The whole page.

    Args:
        notes: sentences about what is not in the page.
    """
    tag, places = in_order(runs)
    found = {run.name: diagnose(observed(run.run)) for run in runs}
    settings = {run.name: _settings(run) for run in runs}
    varying = varying_settings(list(settings.values()))
    body = []
    best = places[0]
    if best.value is not None:
        body.append(html.keys([("best run", best.run.name, ""), (f"its {tag}", f"{best.value:.4f}", "")]))
    body += [f"<p>{escape(said)}</p>" for said in [*notes, *cautions(places), *problems(runs, tag)]]
    columns = {key: texts([settings[place.run.name].get(key, _ABSENT) for place in places]) for key in varying}
    narrow = [key for key, values in columns.items() if max(map(len, values)) <= WIDEST][:MOST_COLUMNS]
    body.append(_ranking(tag, places, {key: columns[key] for key in narrow}, found))
    if tag is not None:
        body += _effects(places, tag, varying, settings)
    shown = [place.run for place in places if place.run.run.scalars][: len(COLORS)]
    if shown:
        logged = sum(bool(run.run.scalars) for run in runs)
        part = f" of {counted(logged, 'run')}" if len(shown) == logged else f" of the best {len(shown)}"
        body.append(html.heading("Curves" if len(shown) == len(runs) else f"Curves{part}"))
        body += charts(shown)
    body += _findings(found)
    if len(narrow) < len(varying):
        rows = [[key, *values] for key, values in columns.items()]
        body.append(html.heading("Settings"))
        head = ["setting", *(place.run.name for place in places)]
        body.append(html.table(head, rows, summary=f"all settings that differ: {len(varying)}"))
    environments = Counter(run.launches[-1].environment for run in runs if run.launches)
    body += [html.heading("Environment"), html.pairs([(counted(many, "run"), said) for said, many in environments.items()])]
    return html.document(f"Comparison of {counted(len(runs), 'run')}", body, command)


def cautions(places: Sequence[RankedRun]) -> Iterator[str]:
    """How far ahead the first place is, compared with other seeds, and which of its values is the last one that was tried."""
    settings = {place.run.name: _settings(place.run) for place in places}
    finite = [(place.run.name, place.value) for place in places if place.value is not None and not stopped(place.run)]
    chosen = [key for key in varying_settings(list(settings.values())) if key not in _NO_QUANTITIES]
    losses: dict[tuple[str, ...], list[float]] = {}
    for name, value in finite:
        losses.setdefault(tuple(_exact(settings[name].get(key, _ABSENT)) for key in chosen), []).append(value)
    if len(losses) < 2:
        return
    preferences = {settings[name].get("objective.loss") for name, _ in finite}  # None: cross-entropy, also beside a teacher
    if len(preferences) > 1:
        minimised = ", ".join(sorted(each or "cross-entropy" for each in preferences))
        yield f"These runs minimise different losses ({minimised}), so their order says nothing."
        return
    (best, lowest), others = finite[0], [min(each) for each in losses.values()]
    gap = sorted(others)[1] - lowest
    spreads = [max(each) - min(each) for each in losses.values() if len(each) > 1]
    ahead = f"{best} is ahead of the next settings by {gap:.2g} ({gap / abs(lowest or 1):.2g} of its loss)"
    if not spreads:
        yield f"{ahead}. Each setting has one seed, so chance is not known: repeat the best ones with --seed_everything 1, 2, …"
    else:
        less = "less" if gap < max(spreads) else "more"
        yield f"{ahead}: {less} than runs that differ by their seed alone, which are up to {max(spreads):.2g} apart."
    for key in chosen:
        tried = sorted({x for name, _ in finite if _is_quantity(x := settings[name].get(key))})
        if len(tried) > 1 and settings[best].get(key) in (tried[0], tried[-1]) and key not in _LENGTHS:
            yield f"{key} {text(settings[best][key])} is at the end of the values that were tried: a better one may lie beyond."


def problems(runs: Sequence[RunCurves], tag: str | None) -> Iterator[str]:
    """One sentence for each run that did not reach its end, or of which something is missing."""
    for run in runs:
        said = stopped(run)
        if said:
            yield f"{run.name} {said}."
        elif tag is not None and run.last(tag) is None:
            yield f"{run.name} has no {tag}."
        yield from (f"{run.name}: {each}." for each in run.run.unread)


def varying_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of the settings that differ between runs and change what is trained, in the order of the settings.

    A setting of a class that only some runs have, with the same value in each of them, differs only by that class.
    """
    keys = list(dict.fromkeys(key for each in settings for key in each))
    classes = {key for key in keys if any(_is_class(each.get(key)) for each in settings)}
    found: list[str] = []
    for key in keys:
        values = {_exact(each.get(key, _ABSENT)) for each in settings}
        if key.rpartition(".")[0] in classes:
            values.discard(_ABSENT)
        if len(values) > 1 and (rule(key) is not Change.FREE or key in OTHER_CURVES):
            found.append(key)
    return found


def text(value: Any) -> str:
    """A setting as the page shows it. A class has no module. A number has four digits if it has no more, else all."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if _is_class(value):
        return str(value).rpartition(".")[2]
    if isinstance(value, list) and value and all(isinstance(each, dict) and "class_path" in each for each in value):
        return ", ".join(text(each["class_path"]) for each in value)
    if not isinstance(value, float):
        return str(value)
    short = number(value)
    return short if math.isclose(float(short.replace(",", "")), value, rel_tol=1e-12) else repr(value)


def texts(values: Sequence[Any]) -> list[str]:
    """The values of one setting as the page shows them. Classes of one name have their module."""
    short, exact = [text(value) for value in values], [_exact(value) for value in values]
    return short if len(set(short)) == len(set(exact)) else exact


def _exact(value: Any) -> str:
    """A text that is the same only for equal values."""
    return str(value) if _is_class(value) or isinstance(value, list) else text(value)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"([A-Za-z_]\w*\.)+[A-Z]\w*", value) is not None


def _settings(run: RunCurves) -> dict[str, Any]:
    return dict(leaves(run.run.config))


def _ranking(
    tag: str | None,
    places: Sequence[RankedRun],
    columns: Mapping[str, Sequence[str]],
    found: Mapping[str, Sequence[Finding]],
) -> str:
    """The table of the runs. `columns`: the values of each setting, in the order of the places."""
    if tag is None:
        said = "No run has logged a loss."
    else:
        said = f"Ordered by the last {tag}. Runs that did not come to a known end follow those that did, whatever their loss."
    rows = []
    losses = (["bits per byte"] if tag == BITS else []) + ["training loss" if tag == "train/loss" else "validation loss"]
    ends = ["steps", "tokens", "time", *(["cost"] if any(cost(place.run.launches) for place in places) else [])]
    for i, place in enumerate(places, 1):
        name, shown = place.run.name, figures(place.run)
        values = [*(shown[loss] for loss in losses), *(column[i - 1] for column in columns.values())]
        findings = f"{len(found[name])}: {found[name][0].name}" if found[name] else "0"
        rows.append(["–" if place.value is None else str(i), name, *values, *(shown[end] for end in ends), findings])
    head = ["", "run", *losses, *columns, *ends, "findings"]
    return html.heading("Ranking") + f"<p>{escape(said)}</p>" + html.table(head, rows, kind="figures")


def _effects(
    places: Sequence[RankedRun], tag: str, varying: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """A chart of the final losses over each setting that is a number."""
    finite = [place for place in places if place.value is not None]
    complete = [place for place in finite if not stopped(place.run)]
    compared = complete if len(complete) > 1 else finite
    drawn: dict[tuple[tuple[float, float, str], ...], list[str]] = {}
    for key in varying:
        values = [(settings[place.run.name].get(key), place) for place in compared]
        if key == "trainer.max_steps":  # a run that ended earlier says nothing about that length
            values = [(x, place) for x, place in values if x == place.run.step]
        points = tuple((float(x), place.value or 0.0, place.run.name) for x, place in values if _is_quantity(x))
        if key not in _NO_QUANTITIES and len({x for x, _, _ in points}) > 1:
            drawn.setdefault(points, []).append(key)
    if drawn:
        yield html.heading("Final loss by setting")
        if compared is complete:
            said = "Each point is a run that came to its end with a finite loss."
        else:
            known = f"{'Only one' if complete else 'No'} run is known to have come to its end."
            said = f"{known} Each point is a run with a finite loss, where it stopped."
        yield f"<p>{said} The line joins the best run of each value.</p>"
    for points, keys in drawn.items():
        yield _effect(" = ".join(keys), tag, points)


def _effect(key: str, tag: str, points: Sequence[tuple[float, float, str]]) -> str:
    values = sorted({x for x, _, _ in points})
    logarithmic = values[0] > 0 and values[-1] > 10 * values[0]
    lowest = [(x, min(y for at, y, _ in points if at == x)) for x in values]
    finals = sorted(y for _, y, _ in points)
    high = finals[0] + 4 * (finals[len(finals) // 2] - finals[0]) if len(finals) > 3 else None
    lines = [Line("best", 0, lowest), *(Line(name, 6, [(x, y)], "points") for x, y, name in points)]
    return chart(
        lines,
        label=f"{tag} by {key}",
        unit=tag,
        x_name=f"{key}{' (logarithmic)' if logarithmic else ''}",
        text_of_x=text,
        high=high if high is not None and high > finals[0] else None,
        columns=_apart(values, math.log10 if logarithmic else float),
        keyed=False,
        logarithmic_x=logarithmic,
    )


def _apart(values: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Values whose texts have room beside each other on a phone, the lowest and the highest among them."""
    last = place(values[-1])
    least, found = 0.18 * (last - place(values[0])), [values[0]]
    for value in values[1:-1]:
        if place(value) - place(found[-1]) >= least and last - place(value) >= least:
            found.append(value)
    return [*found, values[-1]]


def _is_quantity(value: Any) -> TypeGuard[float]:
    return is_number(value) and not isinstance(value, bool)


def _findings(found: Mapping[str, Sequence[Finding]]) -> list[str]:
    rows = [
        [name, each.rule.severity.name.lower(), each.name, each.seen, each.rule.change]
        for name, findings in found.items()
        for each in findings
    ]
    if not rows:
        return []
    return [
        html.heading("Findings"),
        html.table(["run", "", "finding", "seen", "change"], rows, summary=counted(len(rows), "finding"), kind="texts"),
    ]
