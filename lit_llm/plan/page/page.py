"""Whole pages."""

from __future__ import annotations

from collections.abc import Sequence

from lit_llm.core import html_page as html
from lit_llm.plan.numbers import count, duration, money_range, size, two_digits
from lit_llm.plan.page.memory import memory_figure
from lit_llm.plan.page.step import step_figures
from lit_llm.plan.page.sweep import sweep_figure
from lit_llm.plan.plan import Plan
from lit_llm.plan.report import devices, sections
from lit_llm.plan.sweep import Variant


def plan_page(plan: Plan, command: str) -> str:
    """The page of one plan. `command`: that made it."""
    title = f"Plan: {count(plan.parameters)} parameters on {devices(plan)}"
    short, *others = sections(plan)
    body = [*_top(title, command), html.keys(_keys(plan)), html.pairs(short.rows)]
    body += [html.heading("Memory of a step"), memory_figure(plan)]
    body += [html.heading("Time of a step"), step_figures(plan)]
    for section in others:
        table = html.table(section.header, section.rows) if section.header else html.pairs(section.rows)
        body += [html.heading(section.title), table]
    return html.document(title, body)


def sweep_page(found: Sequence[Variant], best: Variant | None, command: str) -> str:
    """The page of a sweep. `best`: the variant that was chosen, if one was."""
    title = f"Sweep: {len(found)} combinations"
    return html.document(title, [*_top(title, command), html.heading("Time against cost"), sweep_figure(found, best)])


def _top(title: str, command: str) -> list[str]:
    return [f"<h1>{html.escape(title)}</h1>", f"<p><code>{html.unbroken(command)}</code></p>"]


def _keys(plan: Plan) -> list[tuple[str, str, str]]:
    verdict, kind = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("capacity unknown", "")}[plan.fits]
    found = [(f"memory per rank: {verdict}", size(plan.memory.needed).partition(" (")[0], kind)]
    if plan.times.step is not None and plan.run_seconds is not None:
        speed = plan.settings.tokens_per_step / plan.times.step
        found += [("a step", duration(plan.times.step), ""), ("tokens per second", two_digits(speed), "")]
        found.append(("the run", f"about {duration(plan.run_seconds)}", ""))
    if plan.usd:
        found.append(("cost", money_range(*plan.usd), ""))
    return found
