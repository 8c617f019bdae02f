"""Charts of signals that are logged for each layer. The lines of a chart are the lowest, median and highest layer's value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from lit_llm.core.number_text import count
from lit_llm.reporting.charts import Line, Points, chart
from lit_llm.reporting.run_curves import RunCurves

SIGNALS = (
    ("health/update_ratio/", "Update / weight norm", "layers"),
    ("health/gradient_norm/", "Gradient norm by layer", "layers"),
    ("health/activation_rms/", "Activations, root mean square", "blocks"),
)


def health_charts(run: RunCurves) -> Iterator[tuple[str, str]]:
    """Yield (title, HTML of the chart) for each of SIGNALS that the run has logged at two steps or more."""
    for prefix, title, parts in SIGNALS:
        logged = [run.over_steps(tag) for tag in run.run.scalars if tag.startswith(prefix)]
        layers = [points for points in logged if any(value for _, value in points)]  # without layers that are not trained
        spread = _spread(layers)
        if len(spread) > 1:
            names = ("highest", "median", "lowest")
            lines = [
                Line(name, color, [(step, values[i]) for step, values in spread], "" if name == "median" else "dashed")
                for i, (name, color) in enumerate(zip(names, (7, 0, 8), strict=True))
            ]
            unit = f"{parts}, logarithmic"
            yield title, chart(lines, label=title, x_name="steps", text_of_x=count, unit=unit, logarithmic=True)


def _spread(layers: Sequence[Points]) -> list[tuple[float, tuple[float, float, float]]]:
    """Return (step, (highest, median, lowest)) over the finite values of `layers` at each step."""
    by_step: dict[float, list[float]] = {}
    for points in layers:
        for step, value in points:
            if math.isfinite(value):
                by_step.setdefault(step, []).append(value)
    return [(step, (max(values), statistics.median(values), min(values))) for step, values in sorted(by_step.items())]
