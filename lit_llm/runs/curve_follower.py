"""The logger of `fit --check_against`, which compares the metrics of a run with the curve of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_llm.checkpoint.manifest import versions
from lit_llm.core.errors import UserError
from lit_llm.runs.curve import COLUMNS, Curve, Row, versions_text

EXACT = 1e-5
"""Allowed relative difference of token counts and learning rates, which depend only on the step. A curve has seven digits."""


class CurveFollower(Logger):
    """Compares the metrics that a run logs with the curve of an earlier run, at each step that the curve has. Warns once, at
    the first difference above the tolerance.

    As a logger, not a callback, it gets the numbers that TensorBoard gets, and reads no tensor from the device.

    Args:
        reference: The curve of the earlier run.
        name: The name of that curve in messages.
        tolerance: Allowed relative difference of training and validation loss. Gradient norms are not compared.
        own_versions: Versions of the packages that this run used, as text; "" if unknown. None: the versions of this process.
    """

    def __init__(self, reference: Curve, name: str, tolerance: float, own_versions: str | None = None) -> None:
        super().__init__()
        self.reference, self.curve_name = reference, name
        self._rows = {row.step: row for row in reference.rows}
        self._versions = reference.facts.get("versions", "")
        self._own_versions = versions_text(versions()) if own_versions is None else own_versions
        self.tolerance = tolerance
        self.left: str | None = None
        """The first difference above the tolerance, as the end of a sentence; None if no difference is above the tolerance."""
        self.compared: set[int] = set()
        self._largest = (0.0, 0, "")

    @classmethod
    def of_file(cls, path: Path, tolerance: float) -> CurveFollower:
        """Make a CurveFollower that compares a run with the curve in a CSV file.

        Raises:
            UserError: The file is not a curve, or the tolerance is not above 0.
        """
        if not tolerance > 0:
            raise UserError(f"check_tolerance is {tolerance}, it must be above 0 (--check_tolerance)")
        try:
            return cls(Curve.read(path), str(path), tolerance)
        except UserError as error:
            raise UserError(f"{error} (--check_against)") from None

    @property
    def name(self) -> str:
        return "curve"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because settings are not compared."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step not in self._rows:
            return
        if values := {column: float(metrics[name]) for column, name in COLUMNS.items() if name in metrics}:
            self._compare(Row(step, **values))

    def catch_up(self, curve: Curve, step: int) -> None:
        """In a resumed run, compare what earlier launches logged, the rows of `curve` up to step `step`, as if logged now."""
        for row in curve.rows:
            if row.step <= step and row.step in self._rows:
                self._compare(row)

    def _compare(self, row: Row) -> None:
        step = row.step
        self.compared.add(step)
        for column, allowed in (
            ("tokens", EXACT),
            ("learning_rate", EXACT),
            ("loss", self.tolerance),
            ("validation_loss", self.tolerance),
        ):
            ours, theirs = getattr(row, column), getattr(self._rows[step], column)
            if ours is None or theirs is None:
                continue
            difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
            if allowed == self.tolerance and difference > self._largest[0]:
                self._largest = (difference, step, column)
            if not difference <= allowed and self.left is None:  # true for NaN, too
                self.left = (
                    f"leaves {self.curve_name} at step {step}: {column.replace('_', ' ')} {ours:.6g}, expected {theirs:.6g} "
                    f"(difference {difference:.2%}, allowed {allowed:.3%}){self._other_versions()}"
                )
                rank_zero_warn(f"This run {self.left}.")

    def _other_versions(self) -> str:
        if not self._versions or not self._own_versions or self._versions == self._own_versions:
            return ""
        return f"; the curve was made with {self._versions}, this run with {self._own_versions}"

    @property
    def followed(self) -> bool:
        return self.left is None and bool(self.compared)

    def summary(self) -> str:
        """The result of all comparisons, as a sentence."""
        if self.left is not None:
            return f"this run {self.left}"
        if not self.compared:
            return f"this run has no logged step in common with {self.curve_name} (--trainer.log_every_n_steps)"
        difference, step, column = self._largest
        largest = f"; largest difference {difference:.3%}, {column.replace('_', ' ')} at step {step}" if step else ""
        return f"this run follows {self.curve_name}: {len(self.compared)} rows of {len(self._rows)}{largest}"
