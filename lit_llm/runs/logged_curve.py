"""The curve of a run folder, read from its TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.checkpoint.format import read_manifest
from lit_llm.errors import UserError
from lit_llm.runs.curve import METRICS, Curve, Row, as_text
from lit_llm.runs.run_folder import config_of, find_checkpoint, settings_of


def logged(run: Path) -> Curve:
    """The logged steps of a run folder, without facts; no rows if nothing was logged."""
    # Sizes of 0 keep every row; an interrupted run's overwritten rows are dropped by the purge step.
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    there = set(events.Tags()["scalars"])
    rows: dict[int, Row] = {}
    for column, metric in METRICS.items():
        for event in events.Scalars(metric) if metric in there else []:
            setattr(rows.setdefault(event.step, Row(event.step)), column, event.value)
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
        raise UserError(f"{run} has no curves: it was run without a TensorBoard logger, or not at all (--run)")
    curve.facts = {
        "versions": as_text(read_manifest(find_checkpoint(run, "last"))["versions"]),
        "seed": str(config["seed_everything"]),
        "precision": str(config["trainer"]["precision"] or "32-true"),
    }
    return curve
