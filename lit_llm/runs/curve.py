"""The curve of a run as a small CSV: comment lines about the run, then one line per logged step. Imports no torch."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lit_llm.core.disk import read_text, write_text
from lit_llm.core.errors import UserError, library_errors

COLUMNS = {
    "tokens": "progress/tokens",
    "loss": "train/loss",
    "learning_rate": "lr",
    "gradient_norm": "grad/norm",
    "validation_loss": "val/loss",
}
"""Column of the CSV → name under which the metric is logged. The column `step` comes before these."""
TOLERANCE = 0.02
"""Default of `check_tolerance`: the allowed relative difference between a loss of a run and the loss in a curve."""


@dataclass
class Row:
    """Record of the logged values of one optimizer step; None where a value was not logged."""

    step: int
    tokens: float | None = None
    loss: float | None = None
    """Nats per token over the step's global batch."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Norm of the gradient before clipping."""
    validation_loss: float | None = None
    """Nats per token of the validation data."""


@dataclass
class Curve:
    """Record of a run's curve: `rows` by ascending step, and `facts` about the run: name, such as seed or command → text."""

    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the curve as CSV to `path`, with seven significant digits per value: the precision of fp32."""
        text = io.StringIO()
        for name, value in self.facts.items():
            text.write(" ".join(f"# {name}: {value}".splitlines()) + "\n")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *COLUMNS])
        for row in self.rows:
            values = [getattr(row, column) for column in ("step", *COLUMNS)]
            writer.writerow("" if value is None else f"{value:.7g}" if value % 1 else str(int(value)) for value in values)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text.getvalue())

    @classmethod
    def read(cls, path: Path) -> Curve:
        """Read a curve from a CSV that `write` has written.

        Raises:
            UserError: The file does not exist, or is not a curve.
        """
        lines = read_text(path).splitlines()
        comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
        facts = {name.strip(): value.strip() for name, _, value in (line[1:].partition(":") for line in comments)}
        reader = csv.DictReader(lines[len(comments) :])
        with library_errors(f"{path} is not a curve"):
            lines_read = [(len(comments) + reader.line_num, values) for values in reader]
        if set(reader.fieldnames or []) - COLUMNS.keys() != {"step"}:
            raise UserError(f"{path} is not a curve: its columns must be step, {', '.join(COLUMNS)}")
        rows = []
        for number, values in lines_read:
            try:
                rows.append(Row(int(values.pop("step")), **{name: float(value) for name, value in values.items() if value}))
            except (TypeError, ValueError):
                raise UserError(f"{path} is not a curve: line {number} contains a value that is not a number") from None
        if all(row.loss is None and row.validation_loss is None for row in rows):
            raise UserError(f"{path} is not a curve: it has no loss to compare with")
        return cls(facts, sorted(rows, key=lambda row: row.step))


def versions_text(versions: Mapping[str, str | None]) -> str:
    """The versions of packages as the text "name version, name version, …", which a curve has as the fact "versions"."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
