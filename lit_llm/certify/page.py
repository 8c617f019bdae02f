"""A certificate as one page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lit_llm.certify.check import KINDS, by_kind
from lit_llm.core import html_page as html
from lit_llm.reporting.charts import Line, chart


def page(certificate: dict[str, Any]) -> str:
    """What was shown, the losses of the layouts over each other, checks by kind, and all of them."""
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
        drawn = chart(lines, label="loss", unit="nats per token", x_name="steps", text_of_x="{:g}".format)
        body += [html.heading("The same losses on every layout"), drawn]
    body += [html.heading("By kind"), html.table(KINDS, by_kind(checks), kind="figures")]
    rows = []
    for each in checks:
        numbers = ["" if each[key] is None else f"{each[key]:.3g}" for key in ("figure", "tolerance")]
        needed = "required" if each["required"] else ""
        rows.append((each["name"], needed, each["outcome"], *numbers, f"{each['unit']} {each['reason']}".strip()))
    header = ("check", "", "outcome", "figure", "at most", "")
    body += [html.heading("All checks"), html.table(header, rows, kind="texts")]
    failed = [each["reproduce"] for each in checks if each["outcome"] == "failed"]
    return html.document("Certificate", [*body, *([html.preformatted("\n".join(failed))] if failed else [])])
