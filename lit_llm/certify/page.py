"""A certificate as one page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lit_llm.core import html_page as html
from lit_llm.reporting.charts import Line, chart


def page(certificate: dict[str, Any]) -> str:
    """What was shown, the losses of the layouts over each other, how near figures are to their tolerances, and all checks."""
    checks, machine = certificate["checks"], certificate["machine"]
    counts = Counter(each["outcome"] for each in checks)
    good = certificate["said"].startswith("certified")
    figures = [
        ("passed", str(counts["passed"]), "good" if good else ""),
        ("failed", str(counts["failed"]), "bad" if counts["failed"] else ""),
        ("skipped", str(counts["skipped"]), ""),
        ("recorded, not judged", str(counts["recorded"]), ""),
    ]
    about = {**machine, **machine["versions"]}
    facts = [(name, str(value)) for name, value in about.items() if not isinstance(value, dict)]
    body = [f"<h1>{certificate['said']}</h1>", html.keys(figures), html.pairs(facts)]
    curves = {
        each["name"].split("/")[1]: each["details"]["losses"]
        for each in checks
        if each["required"] and "losses" in each["details"]
    }
    if curves:
        lines = [Line(name, i % 9, list(enumerate(losses, 1))) for i, (name, losses) in enumerate(curves.items())]
        body += [html.heading("The same losses on every layout"), _chart(lines, "loss, nats per token", "step")]
    if near := _near(checks):
        body += [html.heading("How near to the tolerance"), _chart(near, "figure / tolerance", "check", logarithmic=True)]
    rows = []
    for each in checks:
        numbers = [_short(each[key]) for key in ("figure", "tolerance")]
        rows.append((each["name"], each["outcome"], *numbers, f"{each['unit']} {each['reason']}".strip()))
    header = ("check", "outcome", "figure", "at most", "")
    body += [html.heading("All checks"), html.table(header, rows, kind="texts")]
    failed = [each["reproduce"] for each in checks if each["outcome"] == "failed"]
    return html.document("Certificate", [*body, *([html.preformatted("\n".join(failed))] if failed else [])])


def _near(checks: list[dict[str, Any]]) -> list[Line]:
    kinds: dict[str, list[tuple[float, float]]] = {}
    judged = [each for each in checks if each["figure"] and each["tolerance"]]
    for place, each in enumerate(judged, 1):
        kinds.setdefault(each["name"].split("/")[0], []).append((place, each["figure"] / each["tolerance"]))
    lines = [Line(kind, color % 9, points, "points") for color, (kind, points) in enumerate(kinds.items())]
    return [*lines, Line("tolerance", 7, [(1, 1.0), (max(2, len(judged)), 1.0)], "dashed")] if lines else []


def _chart(lines: list[Line], unit: str, x_name: str, *, logarithmic: bool = False) -> str:
    return chart(lines, label=unit, x_name=x_name, text_of_x=lambda x: f"{x:g}", unit=unit, logarithmic=logarithmic)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
