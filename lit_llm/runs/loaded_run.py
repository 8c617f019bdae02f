"""A run folder as data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from lit_llm.ingest.optional_package import need
from lit_llm.runs.run_folder import CHECKPOINTS, config_of, settings_of

if TYPE_CHECKING:
    import pandas


class Series(NamedTuple):
    """The logged values of one tag, by step."""

    steps: Sequence[int]
    """Optimizer steps that were complete."""
    values: Sequence[float]
    times: Sequence[float]
    """When each was logged, in seconds since 1970."""


class LoadedRun:
    """What a run folder holds. What a resumed run repeated counts once, with its later values.

    Args:
        path: the run folder.

    Raises:
        UserError: It is not a run folder.
    """

    def __init__(self, path: Path) -> None:
        config_of(path)
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of the run: its config.yaml."""
        return settings_of(self.path)

    @cached_property
    def checkpoints(self) -> list[Path]:
        """The checkpoints of steps, oldest first, without the links `last`, `best` and `stable`."""
        return sorted((self.path / CHECKPOINTS).glob("step-*.ckpt"))

    @cached_property
    def scalars(self) -> dict[str, Series]:
        """Every logged number, by tag. A run that logged nothing has none."""
        found = {}
        for tag in sorted(self._events.Tags()["scalars"]):
            events = self._events.Scalars(tag)
            found[tag] = Series(*([getattr(e, name) for e in events] for name in ("step", "value", "wall_time")))
        return found

    @cached_property
    def texts(self) -> dict[str, list[tuple[int, str]]]:
        """Every logged text as (step, text), by tag, such as "samples/0"."""
        found = {}
        for tag in sorted(self._events.Tags()["tensors"]):
            name, is_text, _ = tag.rpartition("/text_summary")
            if is_text:
                events = self._events.Tensors(tag)
                found[name] = [(e.step, make_ndarray(e.tensor_proto).item().decode(errors="replace")) for e in events]
        return found

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The logged numbers as a table: a column for each tag, a row for each step at which something was logged.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = need("pandas", extra="notebook", what="a table of curves")
        columns = {tag: pandas.Series(s.values, index=s.steps, dtype="float64") for tag, s in self.scalars.items()}
        return pandas.DataFrame(columns).rename_axis("step").sort_index()

    @cached_property
    def _events(self) -> EventAccumulator:
        # Sizes of 0 keep every row. The purge step of a resumed run drops the rows that it repeats.
        events = EventAccumulator(str(self.path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        return events
