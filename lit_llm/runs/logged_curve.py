"""The curve of a run folder, read from its metrics.jsonl, or its TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lit_llm.checkpoint.disk_format import read_manifest
from lit_llm.core.errors import UserError
from lit_llm.runs.curve import METRICS, Curve, Row, as_text
from lit_llm.runs.loaded_run import LoadedRun, Series
from lit_llm.runs.run_folder import config_of, settings_of
from lit_llm.runs.saved_run import find_checkpoint


def logged(run: Path) -> Curve:
    """The logged steps of a run folder, without facts; no rows if nothing was logged."""
    return curve_of_scalars(LoadedRun(run, of_lit_llm=False).scalars)


def curve_of_scalars(scalars: Mapping[str, Series]) -> Curve:
    """The same, from the logged numbers by tag."""
    rows: dict[int, Row] = {}
    for column, metric in METRICS.items():
        series = scalars.get(metric, Series((), (), ()))
        for step, value in zip(series.steps, series.values, strict=True):
            setattr(rows.setdefault(step, Row(step)), column, value)
    return Curve(rows=[rows[step] for step in sorted(rows)])


def curve_of(run: Path) -> Curve:
    """The same, with seed, precision and versions from the run's config and last checkpoint.

    The folder does not record hardware and command: the notes of `curve` add them.

    Raises:
        UserError: It is not a run folder, or nothing was logged.
    """
    config = settings_of(config_of(run).parent)
    curve = logged(run)
    if not curve.rows:
        raise UserError(f"{run} has no curves: it was run without a logger (trainer.logger=false), or not at all (--run)")
    curve.facts = {
        "versions": as_text(read_manifest(find_checkpoint(run, "last"))["versions"]),
        "seed": str(config["seed_everything"]),
        "precision": str(config["trainer"]["precision"] or "32-true"),
    }
    return curve
