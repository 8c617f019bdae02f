"""The HTML page of `report --compare`: a ranking of runs by their final loss, and the effect of each setting on the loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import counted
from lit_llm.reporting.charts import COLORS, Line, chart
from lit_llm.reporting.comparable import comparable, conditions, grouped
from lit_llm.reporting.doctor.diagnose import diagnose, observed
from lit_llm.reporting.doctor.finding import Finding
from lit_llm.reporting.doctor.observed import is_number
from lit_llm.reporting.ranking import BITS, SEEDS, Setting, diverged, figures, ranked, same_curves, stopped
from lit_llm.reporting.report_page import charts, samples
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.reporting.setting_texts import ABSENT, exact, settings_of, text, texts, varying_settings
from lit_llm.reporting.summary import cost

MOST_COLUMNS, WIDEST = 12, 40
"""The most settings that have a column in the ranking, and the most characters of a value of such a setting."""
MOST_NOTES = 3
_LENGTHS = ("trainer.max_steps", "trainer.max_epochs")
"""Settings of a run's length. No note suggests larger values of them, because a longer run always has a lower loss."""


class Ranking(NamedTuple):
    """Record of runs whose losses can be compared, in groups of runs that differ by their seeds alone (`ranking.Setting`).

    Args:
        condition: the facts by which these runs differ from the runs of other rankings; "" if there is one ranking.
        tag: name of the logged curve by whose last value the groups are ordered; None if no run has logged a loss.
        places: the groups of runs, the lowest loss first.
    """

    condition: str
    tag: str | None
    places: list[Setting]

    @property
    def runs(self) -> list[RunCurves]:
        """The runs of all `places`, in the same order. Of runs of one place with equal curves, only one is listed."""
        return [run for place in self.places for run in place.runs]


def rankings(runs: Sequence[RunCurves]) -> list[Ranking]:
    """Return one ranking for each group of comparable runs (see `comparable`), the ranking with most runs first."""
    parts = sorted(grouped(runs, comparable), key=len, reverse=True)
    return [Ranking(said, *ranked(part)) for said, part in zip(conditions(parts), parts, strict=True)]


def comparison_page(comparison: Sequence[Ranking], command: str, notes: Sequence[str] = ()) -> str:
    """Return the whole HTML page of a comparison of runs.

    Args:
        command: the command that made the page.
        notes: sentences for the top of the page, the most important first. Only the first `MOST_NOTES` are shown unfolded.
    """
    runs = [run for ranking in comparison for run in ranking.runs]
    many = sum(len(place.names) for ranking in comparison for place in ranking.places)
    findings = {run.name: diagnose(observed(run.run)) for run in runs}
    body = []
    best = comparison[0].places[0]
    if len(comparison) == 1 and best.value is not None:
        body.append(html.keys([("best", best.name, ""), (f"its {comparison[0].tag}", best.said(), "")]))
    body += [f"<p>{escape(said)}</p>" for said in notes[:MOST_NOTES]]
    if more := notes[MOST_NOTES:]:
        listed = "".join(f"<p>{escape(said)}</p>" for said in more)
        body.append(f"<details><summary>{counted(len(more), 'more note')}</summary>{listed}</details>")
    for ranking in comparison:
        body += _part(ranking, findings)
    body += _findings(findings)
    environments = Counter(run.environment for run in runs if run.launches)
    body += [html.heading("Environment"), html.pairs([(counted(many, "run"), said) for said, many in environments.items()])]
    return html.document(f"Comparison of {counted(many, 'run')}", body, command)


def _part(ranking: Ranking, findings: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yield the HTML of one ranking: table, effects of settings, curves, samples. `findings`: {name of a run: findings}."""
    tag, places = ranking.tag, ranking.places
    settings = {run.name: settings_of(run) for run in ranking.runs}
    varying = varying_settings(list(settings.values()))
    columns = {key: texts([settings[place.runs[0].name].get(key, ABSENT) for place in places]) for key in varying}
    for key in SEEDS:
        if key in columns:
            columns[key] = [", ".join(text(settings[run.name].get(key, ABSENT)) for run in place.runs) for place in places]
    narrow = [key for key, values in columns.items() if max(map(len, values)) <= WIDEST][:MOST_COLUMNS]
    yield _ranking(ranking, {key: columns[key] for key in narrow}, findings)
    if tag is not None:
        yield from _effects(places, tag, varying, settings)
    logged = [place for place in places if place.runs[0].run.scalars]
    equal = grouped(logged, lambda one, two: same_curves(one.runs[0], two.runs[0]))
    once = [places[0]._replace(names=sum((place.names for place in places), ())) for places in equal]
    shown = once[: len(COLORS)]
    if shown:
        part = f"the best {len(shown)}" if len(shown) < len(once) else counted(len(logged), "setting")
        yield html.heading("Curves" if len(shown) == len(places) else f"Curves of {part}")
        yield html.columns(charts(shown))
        written = [part for place in shown for part in samples(place.runs[0], f"Samples: {place.runs[0].name}")]
        yield html.columns(written) if written else ""
    if len(narrow) < len(varying):
        rows = [[key, *values] for key, values in columns.items()]
        yield html.heading("Settings")
        head = ["setting", *(place.name for place in places)]
        yield html.table(head, rows, summary=f"all settings that differ: {len(varying)}")


def notes(comparison: Sequence[Ranking], left_out: Sequence[str] = ()) -> list[str]:
    """Return sentences for the top of the page, the most surprising first. `left_out`: sentences about folders left out."""
    said = []
    if len(comparison) > 1:
        said.append(
            f"These are {len(comparison)} rankings, because runs differ in their task, held-out text or tokenizer (headings)."
        )
    said += [sentence for ranking in comparison for sentence in _cautions(ranking.places)]
    runs = [(run, ranking.tag) for ranking in comparison for run in ranking.runs]
    wrong = [(diverged(run), sentence) for run, tag in runs for sentence in _problems(run, tag)]
    said += [sentence for _, sentence in sorted(wrong, key=lambda each: not each[0])]
    return [*said, *left_out]


def _cautions(places: Sequence[Setting]) -> Iterator[str]:
    """Yield sentences: whether the best complete run leads by more than seeds explain, which runs have equal curves, and which
    settings of the best run have the lowest or the highest of the compared values.
    """
    finite = [place for place in places if place.value is not None and not stopped(place.runs[0])]
    settings = [settings_of(place.runs[0]) for place in finite]
    chosen = [key for key in varying_settings(settings) if key not in SEEDS]
    values = [[exact(each.get(key, ABSENT)) for key in chosen] for each in settings]
    second = next((place for place, each in zip(finite, values, strict=True) if each != values[0]), None)
    if second is None:
        return
    best, value = finite[0], finite[0].value or 0.0
    gap = (second.value or 0.0) - value
    ahead = f"{best.name} is ahead of {second.name} by {gap:.2g} ({gap / abs(value or 1):.2g} of its loss)"
    repeated = [(len(place.runs) - 1, place.spread**2) for place in finite if place.spread is not None]
    if not repeated:
        yield f"{ahead}. Each setting has one seed, so chance is not known: repeat the best ones with --seed_everything 1, 2, …"
    else:
        freedom = sum(many for many, _ in repeated)
        variance = sum(many * square for many, square in repeated) / freedom
        chance = t_quantile(freedom) * math.sqrt(variance * sum(1 / len(place.runs) for place in (best, second)))
        less = "less" if gap < chance else "more"
        yield f"{ahead}: {less} than the {chance:.2g} that seeds explain (t-test, 95 %)."
    same = (next((one for one in finite[:i] if same_curves(one.runs[0], two.runs[0])), two) for i, two in enumerate(finite))
    equal = [f"{one.name} and {two.name}" for one, two in zip(same, finite, strict=True) if one is not two]
    if equal:
        yield f"{'; '.join(equal)} have equal curves: the settings that differ change nothing."
    ends = []
    for key in chosen:
        tried = sorted({x for each in settings if is_number(x := each.get(key))})
        same_class = len({each.get(key.rpartition(".")[0]) for each in settings}) == 1  # another one has other defaults
        if len(tried) > 1 and settings[0].get(key) in (tried[0], tried[-1]) and same_class and key not in _LENGTHS:
            ends.append(f"{key} {text(settings[0][key])}")
    if ends:
        more = f" and {counted(len(ends) - 3, 'more setting')}" if len(ends) > 3 else ""
        yield f"The best run has the lowest or highest value tried of {', '.join(ends[:3])}{more}: try values beyond."


def t_quantile(freedom: int) -> float:
    """Return x such that |t| > x has a probability of 5 %, within 0.3 %, for Student's t of `freedom` degrees of freedom."""
    table = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228
    return table[freedom - 1] if freedom <= len(table) else 1.96 + 2.6 / freedom


def _problems(run: RunCurves, tag: str | None) -> Iterator[str]:
    """Yield sentences: that the run stopped early, and why, or has no curve `tag`; which of its files could not be read."""
    if said := stopped(run):
        yield f"{run.name} {said}."
    elif tag is not None and run.last(tag) is None:
        yield f"{run.name} has no {tag}."
    yield from (f"{run.name}: {each}." for each in run.run.unread)


def _ranking(ranking: Ranking, columns: Mapping[str, Sequence[str]], by_run: Mapping[str, Sequence[Finding]]) -> str:
    """Return the HTML table of a ranking. `columns`: {differing setting: its value for each place}. `by_run`: {name of a run:
    findings}."""
    tag, places = ranking.tag, ranking.places
    if tag is None:
        said = "No run has logged a loss."
    else:
        said = f"Ordered by the last {tag}: the mean over seeds ± their sample standard deviation. Other columns are the first "
        said += "run's. Runs that did not come to a known end follow those that did, whatever their loss."
    rows = []
    losses = ["training loss" if tag == "train/loss" else "validation loss"]
    ends = ["steps", "tokens", "time", *(["cost"] if any(cost(run.launches) for run in ranking.runs) else [])]
    for i, place in enumerate(places, 1):
        run = place.runs[0]
        shown, more = figures(run), f" × {len(place.runs)} seeds" if len(place.runs) > 1 else ""
        shown[losses[0]] = shown[losses[0]] if tag == BITS or place.value is None else place.said()
        values = [*([place.said()] if tag == BITS else []), *(shown[loss] for loss in losses)]
        values += [*(column[i - 1] for column in columns.values()), *(shown[end] for end in ends)]
        first = next((each for other in place.runs for each in by_run[other.name]), None)
        findings = sum(len(by_run[other.name]) for other in place.runs)
        rows.append(
            [
                "–" if place.value is None or len(places) == 1 else str(i),
                place.name + more,
                *values,
                f"{findings}: {first.name}" if first else "0",
            ]
        )
    head = ["", "run", *(["bits per byte"] if tag == BITS else []), *losses, *columns, *ends, "findings"]
    title = f"Ranking: {ranking.condition}" if ranking.condition else "Ranking"
    return html.heading(title) + f"<p>{escape(said)}</p>" + html.table(head, rows, kind="figures")


def _effects(
    places: Sequence[Setting], tag: str, varying: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a chart, as HTML, of final losses over each numeric setting with several values. `settings`: {name of a run: …}."""
    finite = [place for place in places if place.value is not None]
    complete = [place for place in finite if not stopped(place.runs[0])]
    compared = complete if len(complete) > 1 else finite
    drawn: dict[tuple[tuple[float, Setting], ...], list[str]] = {}
    for key in varying:
        values = [(settings[place.runs[0].name].get(key), place) for place in compared]
        if key == "trainer.max_steps":  # a run that ended earlier says nothing about that length
            values = [(x, place) for x, place in values if x == place.runs[0].step]
        points = tuple((float(x), place) for x, place in values if is_number(x))
        if key not in SEEDS and len({x for x, _ in points}) > 1:
            drawn.setdefault(points, []).append(key)
    if drawn:
        yield html.heading("Final loss by setting")
        if compared is complete:
            said = "Each point is a run that came to its end with a finite loss."
        else:
            known = f"{'Only one' if complete else 'No'} run is known to have come to its end."
            said = f"{known} Each point is a run with a finite loss, where it stopped."
        yield f"<p>{said} The line joins the best mean of each value.</p>"
        yield html.columns(("", _effect(" = ".join(keys), tag, points)) for points, keys in drawn.items())


def _effect(key: str, tag: str, points: Sequence[tuple[float, Setting]]) -> str:
    values = sorted({x for x, _ in points})
    logarithmic = values[0] > 0 and values[-1] > 10 * values[0]
    lowest = [(x, min(place.value or 0.0 for at, place in points if at == x)) for x in values]
    runs = [(x, run.last(tag) or 0.0, run.name) for x, place in points for run in place.runs]
    finals = sorted(y for _, y, _ in runs)
    high = finals[0] + 4 * (finals[len(finals) // 2] - finals[0]) if len(finals) > 3 else None
    lines = [Line("best", 0, lowest), *(Line(name, 6, [(x, y)], "points") for x, y, name in runs)]
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
    """Return the ascending `values` without those whose axis labels would overlap on a phone. The first and the last value
    stay. `place`: function from a value to its position."""
    last = place(values[-1])
    least, kept = 0.18 * (last - place(values[0])), [values[0]]
    for value in values[1:-1]:
        if place(value) - place(kept[-1]) >= least and last - place(value) >= least:
            kept.append(value)
    return [*kept, values[-1]]


def _findings(by_run: Mapping[str, Sequence[Finding]]) -> list[str]:
    rows = [
        [name, each.rule.severity.name.lower(), each.name, each.seen, each.rule.change]
        for name, findings in by_run.items()
        for each in findings
    ]
    if not rows:
        return []
    return [
        html.heading("Findings"),
        html.table(["run", "", "finding", "seen", "change"], rows, summary=counted(len(rows), "finding"), kind="texts"),
    ]
