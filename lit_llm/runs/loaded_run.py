"""Reads a run folder: its settings, curves, texts and checkpoints."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.util.tensor_util import make_ndarray

from lit_llm.core.errors import UserError, need
from lit_llm.runs.curve import COLUMNS, Curve, Row
from lit_llm.runs.event_files import FRAME, EventFile, read_events
from lit_llm.runs.metrics_rows import MetricsRows, csv_values
from lit_llm.runs.run_folder import CHECKPOINTS, CONFIG, CSV_METRICS, METRICS, config_of, settings_of

if TYPE_CHECKING:
    import pandas


class Series(NamedTuple):
    """Record of the logged values of one metric: lists of equal length, by ascending step."""

    steps: Sequence[int]
    """For each value, the number of optimizer steps that were complete when it was logged."""
    values: Sequence[float]
    times: Sequence[float]
    """The time at which each value was logged, in seconds since 1970."""


class LoadedRun:
    """The settings, curves, texts and checkpoints in a run folder. If a step was logged twice, the later values count.

    Args:
        path: the run folder.
        of_lit_llm: whether lit_llm must have written the folder. False: any TensorBoard logger may have written it.

    Raises:
        UserError: `of_lit_llm` is true, but the folder has neither a config.yaml nor a metrics.jsonl.
    """

    def __init__(self, path: Path, *, of_lit_llm: bool = True) -> None:
        if of_lit_llm and not (path / METRICS).is_file():
            config_of(path)
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings in config.yaml, as nested dicts; empty without that file, as in a run of another project."""
        return settings_of(self.path) if (self.path / CONFIG).exists() else {}

    def setting(self, key: str) -> Any:
        """The value of a setting by its dotted key; None if the run has no such setting."""
        return setting_in(self.config, key)

    @cached_property
    def checkpoints(self) -> list[Path]:
        """Paths of the folder's checkpoints, oldest first, without the links `last`, `best` and `stable`."""
        return sorted((self.path / CHECKPOINTS).glob("step-*.ckpt"))

    @cached_property
    def scalars(self) -> dict[str, Series]:
        """Name of a metric (tag) → its logged values. Empty if nothing was logged.

        The values are read from the first of these that has any: metrics.jsonl, which is written whatever logger the run used;
        TensorBoard's events; a CSVLogger's metrics.csv.
        """
        columns = {} if self._rows is None else self._rows.columns
        if not columns:
            for tag in self.events.Tags()["scalars"]:
                rows = self.events.Scalars(tag)
                columns[tag] = [row.step for row in rows], [row.value for row in rows], [row.wall_time for row in rows]
        if not columns and (written := self.path / CSV_METRICS).is_file():
            columns = csv_values(written)
        return {tag: by_step(*columns[tag]) for tag in sorted(columns) if columns[tag][0]}

    @property
    def curve(self) -> Curve:
        """The curve of the run, without facts: a row for each logged step, and no rows if nothing was logged."""
        rows: dict[int, Row] = {}
        for column, metric in COLUMNS.items():
            series = self.scalars.get(metric, Series((), (), ()))
            for step, value in zip(series.steps, series.values, strict=True):
                setattr(rows.setdefault(step, Row(step)), column, value)
        return Curve(rows=[rows[step] for step in sorted(rows)])

    @cached_property
    def texts(self) -> dict[str, list[tuple[int, str]]]:
        """Tag, such as "samples/0" → the texts logged under this tag, as (step, text) by ascending step."""
        by_tag: dict[str, dict[int, str]] = {}
        for file in self._event_files.values():
            for event in file.events:
                if event.session_log.status == SessionLog.START:  # a resumed run logs the following steps again
                    by_tag = {tag: {s: text for s, text in texts.items() if s < event.step} for tag, texts in by_tag.items()}
                for value in event.summary.value:
                    name, is_text, _ = value.tag.rpartition("/text_summary")
                    if is_text:
                        by_tag.setdefault(name, {})[event.step] = _joined(make_ndarray(value.tensor))
        return {tag: sorted(by_tag[tag].items()) for tag in sorted(by_tag)}

    @cached_property
    def unread(self) -> list[str]:
        """One sentence for each part of metrics.jsonl and event files that cannot be read, such as a half-written row."""
        sentences = [] if self._rows is None else list(self._rows.unread)
        for path, file in self._event_files.items():
            read, lost = file.read, "samples"
            if self._rows is None:  # only the event files have the rows, so their checksums are compared
                read, lost = sum(len(record) + FRAME for record in RawEventFileLoader(str(path)).Load()), "rows"
            if read < file.size:
                sentences.append(
                    f"{path.name} cannot be read after byte {read:,} of {file.size:,}: the {lost} behind it are missing"
                )
        return sentences

    @cached_property
    def _event_files(self) -> dict[Path, EventFile]:
        return {path: read_events(path) for path in sorted(self.path.glob("*tfevents*"))}

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The logged numbers as a table: a column for each tag, a row for each step at which something was logged.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = need("pandas", what="a table of curves")
        columns = {tag: pandas.Series(s.values, index=s.steps, dtype="float64") for tag, s in self.scalars.items()}
        return pandas.DataFrame(columns).rename_axis("step").sort_index()

    @cached_property
    def _rows(self) -> MetricsRows | None:
        return MetricsRows(self.path / METRICS) if (self.path / METRICS).is_file() else None

    @cached_property
    def events(self) -> EventAccumulator:
        """All events in the TensorBoard files of the folder. Of a step that a resumed run logged again: only the newest events.

        Raises:
            UserError: An event file was not written by TensorBoard.
        """
        # A size of 0 keeps every row. TensorBoard drops rows that a resumed run repeats, and warns of it: silenced here.
        events = EventAccumulator(str(self.path), size_guidance={"scalars": 0, "tensors": 0})
        log = logging.getLogger("tensorboard")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            events.Reload()
        except (DecodeError, UnicodeEncodeError):  # not an event, or a name that is not UTF-8
            raise UserError(f"an event file in {self.path} is not TensorBoard's: move it to another folder (--run)") from None
        finally:
            log.setLevel(level)
        return events


def setting_in(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, such as trainer.max_steps, in nested dicts; None if a part of the key is missing."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def by_step(steps: list[int], values: list[float], times: list[float]) -> Series:
    """A Series of the values, sorted by step. If a step has several values, the Series has only the last one."""
    if any(map(operator.ge, steps, steps[1:])):
        last = dict(zip(steps, zip(values, times, strict=True), strict=True))
        steps = sorted(last)
        values, times = ([last[step][i] for step in steps] for i in (0, 1))
    return Series(steps, values, times)


def _joined(texts: Any) -> str:
    return "\n".join(each.decode(errors="replace") for each in texts.flatten().tolist())
