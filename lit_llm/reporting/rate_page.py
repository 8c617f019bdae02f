"""The HTML page of `find-lr`: charts of the learning-rate sweeps and of the short runs."""

from __future__ import annotations

import math

from lit_llm.core import html_page as html
from lit_llm.reporting.charts import Line, chart, number
from lit_llm.training.rate_search import FoundRates


def rate_page(advice: FoundRates, title: str, command: str) -> str:
    """Return the whole HTML page about `advice`, the learning rates that `find-lr` suggests. `command` made the page."""
    body = [html.keys([(key, number(rate), "") for key, rate in advice.rates.items()])]
    rows = [
        (key, number(advice.recipe[key]), number(rate), f"{number(min(each))} – {number(max(each))}")
        for (key, rate), each in zip(advice.rates.items(), advice.by_seed.values(), strict=True)
    ]
    if advice.factor != 1:
        body.append(
            f"<p>A short run has {advice.probe_steps} steps. The suggestion is {advice.factor:.2f} times its best rate.</p>"
        )
    body.append(html.table(("rate", "recipe", "suggestion", "over seeds"), rows))
    for key in advice.rates:
        body.append(html.heading(f"{key}: short runs"))
        lines = [
            Line(f"seed {seed}", seed % 9, sorted(losses.items()), "dots") for seed, losses in enumerate(advice.probes[key])
        ]
        body.append(_chart(lines, f"loss at the end of {advice.probe_steps} steps", cut=True))
        body.append(html.heading(f"{key}: sweep"))
        sweep = advice.sweeps[key]
        each = Line("each step", 8, list(zip(sweep.rates, sweep.losses, strict=False)))
        body.append(_chart([each, Line("smoothed", 0, list(zip(sweep.rates, sweep.smoothed, strict=False)))], "training loss"))
        body.append(
            f"<p>Without the differences between batches. Lowest at {number(sweep.edge)}. "
            f"The search began at {number(sweep.start)}.</p>"
        )
    return html.document(title, body, command)


def _chart(lines: list[Line], label: str, *, cut: bool = False) -> str:
    """Return a chart of losses over learning rates. `cut`: whether losses above 1.5 times the lowest loss are cut off."""
    losses = [y for line in lines for _, y in line.points if math.isfinite(y)]
    high = 1.5 * min(losses) if cut and losses else None
    return chart(
        lines, label=label, x_name="the learning rate", text_of_x="{:.2g}".format, unit=label, high=high, logarithmic_x=True
    )
