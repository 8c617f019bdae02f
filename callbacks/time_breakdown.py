"""Divides training time into parts, such as forward and backward, whose fractions add up to 1."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ._lightning import _PutsBack, is_logged, is_optimizer_step, listen, part_of, write_row
from ._torch import is_profiling, profiler_events
from .errors import UserError, without
from .ranges import STEPS, check_ranges, whole

PARTS = ("data_stall", "forward", "backward", "communication", "optimizer", "checkpoint", "validation", "other")
_COMPUTING = ("forward", "backward", "optimizer")  # parts whose waits for collectives are counted as communication
# Prefixes of events that are not computation: launching collectives, waiting for them, and operators around both.
_COMMUNICATION = ("c10d::", "_c10d_functional::", "FSDP::", "gloo:", "nccl:")
_FOLD_AT = 4096  # marks kept before finished ones are added up


class TimeBreakdown(_PutsBack):
    """Logs which fractions of wall-clock time training spends on data, forward, backward and so on, on rank 0.

    Logs at logged steps (not the first step of a process), fractions of the time since the last logged step:
        `time/data_stall_fraction`: waiting for the train loader's next(), and moving the batch to the device.
        `time/forward_fraction`, `time/backward_fraction`: `training_step` and the backward pass.
        `time/communication_fraction`: time in which a rank only waits for collectives, slower ranks included. It is subtracted
            from forward, backward and optimizer. Collectives that overlap with computation are not counted.
        `time/optimizer_fraction`: norm, clipping, every callback's `on_before_optimizer_step`, the update, zeroing gradients.
        `time/checkpoint_fraction`, `time/validation_fraction`: saving, as long as it blocks training, and validation.
        `time/other_fraction`: callbacks, loggers, the Trainer's loop, text samples.
    `Throughput` logs `time/data_fraction`, time in next() / training time. It is larger if an accelerator works meanwhile.

    Method: the Trainer reports the begin and end of its actions to its profiler. A part's time is the time of its actions,
    without nested parts, by the host's clock, or on CUDA by events on the current stream: the time in which the device executed
    the part's work or waited for this work. The host synchronises with the device only at logged and at sampled steps.

    Collectives (gloo's on a CPU, NCCL's kernels on CUDA) run on threads and streams that no hook can time. So torch.profiler
    records one step in `communication_every_n_steps`, on CUDA only kernels, with a synchronisation between parts. Until the
    next sampled step, the share of each part that was communication is subtracted from the part. The first sampled step is the
    third step of a process, and the first row comes after that step. No step is sampled while another torch.profiler records.
    A CPU that runs no operator during a collective (a sleep, a long Python loop) counts as waiting.

    Contract:
        on_train_start: wraps the Trainer's profiler and validation.
        on_train_batch_start: starts recording if the step is sampled.
        on_before_optimizer_step: writes the row.
        teardown, on_exception: unwrap profiler and validation.
        State: none.
    Cost: not measurable on one process, below 0.5 % on two gloo processes (benchmarks/callback_cost.py); not measured on CUDA.

    Args:
        communication_every_n_steps: sample communication in one of this many optimizer steps.

    Raises:
        UserError: communication_every_n_steps < 1; manual optimization, whose parts the Trainer does not report.
    """

    def __init__(self, communication_every_n_steps: Annotated[int, whole(1, STEPS)] = 100) -> None:
        check_ranges(TimeBreakdown, locals())
        self.communication_every_n_steps = communication_every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} uses manual optimization, which TimeBreakdown cannot divide into parts:"
                f" {without(TimeBreakdown)}."
            )
        self._put_back()
        self._clock = clock_of(trainer.strategy.root_device)
        self._running: list[str] = []  # open parts, the innermost last
        self._marks: deque[tuple[Any, str]] = deque()  # a time, and the part that ran until then
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the last row, from the marks added up so far
        self._begun = False
        self._several = trainer.world_size > 1
        self._recording: profile | None = None
        self._recorded: list[tuple[int, str]] = []  # marks of the step being sampled, in ns since the epoch
        self._sample_at = trainer.global_step + 3  # the next optimizer step to sample; DDP rebuilds its buckets in the second
        self._seen = 0  # the last step handled: on_train_batch_start runs once per micro-batch
        self._waits: dict[str, float] | None = None  # communication share of each part, in the last sampled step
        parts: dict[str, str | None] = {}  # the part of each action that the Trainer has reported

        def started(action: str) -> None:
            if (part := parts.setdefault(action, part_of(action))) is not None:
                self._enter(part)

        def stopped(action: str) -> None:
            if parts.get(action) is not None:
                self._leave()
            if self._recording is not None and is_optimizer_step(action):
                self._end_sample()

        self._undo = (self._stop_recording, listen(trainer, started, stopped))

    def _enter(self, part: str) -> None:
        self._mark()
        # Everything nested in validation counts as validation, except saving the best checkpoint.
        self._running.append("validation" if "validation" in self._running and part != "checkpoint" else part)

    def _leave(self) -> None:
        self._mark()
        self._running.pop()

    def _mark(self) -> None:
        """Append a mark: (the current time, the part that ran until now). The part ends here or is interrupted here."""
        part = self._running[-1] if self._running else "other"
        if self._recording is not None:
            self._clock.synchronize()
            self._recorded.append((time.time_ns(), part))
        self._marks.append((self._clock.now(), part))
        if len(self._marks) >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        """For marks that the device has passed: add the seconds between two marks to the part that ran then; drop the marks."""
        while len(self._marks) > 1 and self._clock.passed(self._marks[1][0]):
            begin, _ = self._marks.popleft()
            end, part = self._marks[0]
            self._seconds[part] += self._clock.seconds(begin, end)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if not self._several or step < self._sample_at or step == self._seen:
            return
        self._seen = step
        if is_profiling():
            return
        self._sample_at = step + self.communication_every_n_steps
        self._recorded = []
        self._recording = profile(activities=[self._clock.activity])
        self._recording.start()
        self._mark()

    def _end_sample(self) -> None:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        recording.stop()
        events = profiler_events(recording)
        self._waits = _waits(*_intervals(events, on_device=isinstance(self._clock, _DeviceClock)), self._recorded)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step = trainer.global_step + 1
        logged = is_logged(trainer, step)
        if self._begun and (not logged or (self._several and self._waits is None)):
            return
        self._mark()
        self._clock.synchronize()
        self._fold()
        row = self._fractions()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        if not self._begun:  # the first step of a process compiles and warms up
            self._begun = True
            return
        write_row(trainer, row, step)

    def _fractions(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        for part in _COMPUTING:
            waited = seconds[part] * (self._waits or {}).get(part, 0.0)
            seconds[part] -= waited
            seconds["communication"] += waited
        total = max(sum(seconds.values()), 1e-9)
        return {f"time/{part}_fraction": seconds[part] / total for part in PARTS}

    def _stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None


class _HostClock:
    """Clock of `TimeBreakdown` that takes times from the host."""

    activity = ProfilerActivity.CPU

    def now(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def synchronize(self) -> None: ...


class _DeviceClock:
    """Clock of `TimeBreakdown` by CUDA events. An event's time is when the device has done all work queued before it."""

    activity = ProfilerActivity.CUDA

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> _HostClock | _DeviceClock:
    """Return a new clock that times work on a device: by events for a CUDA device, by the host for any other device."""
    return _DeviceClock(device) if device.type == "cuda" else _HostClock()


Interval = tuple[int, int]  # begin and end, ns since the epoch


def _intervals(events: Iterable[Any], *, on_device: bool) -> tuple[list[Interval], list[Interval]]:
    """(intervals of collectives, intervals of computation), from the events of a torch.profiler.

    If `on_device`, computation is the device's kernels and copies; else the host's innermost operators, which do not wait.
    """
    collectives: list[Interval] = []
    computing: list[Interval] = []
    by_thread: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        name, begin, duration = event.name(), event.start_ns(), event.duration_ns()
        if on_device:
            if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
                (collectives if "nccl" in name.lower() else computing).append((begin, begin + duration))
        elif event.is_async():
            if name.startswith("gloo:"):
                collectives.append((begin, begin + duration))
        else:
            by_thread.setdefault(event.start_thread_id(), []).append((begin, -duration, name))
    for spans in by_thread.values():
        spans.sort()  # of spans with the same begin, the outer one first
        next_begins = [begin for begin, _, _ in spans[1:]] + [spans[-1][0] - spans[-1][1]]
        for (begin, minus_duration, name), next_begin in zip(spans, next_begins, strict=True):
            if next_begin >= begin - minus_duration and not name.startswith(_COMMUNICATION):
                computing.append((begin, begin - minus_duration))
    return collectives, computing


def _waits(collectives: list[Interval], computing: list[Interval], marks: list[tuple[int, str]]) -> dict[str, float]:
    """Part → share of the part's time in which a collective ran without any computation.

    Args:
        marks: (time in ns, the part that ran from the previous mark until this time).
    """
    times = np.array([time for time, _ in marks])
    edges = np.unique([*times, *(time for span in (*collectives, *computing) for time in span)])
    begins, lengths = edges[:-1], np.diff(edges)  # of stretches in which nothing begins or ends

    def under_way(spans: list[Interval]) -> np.ndarray:
        begun, ended = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return np.searchsorted(np.sort(begun), begins, "right") - np.searchsorted(np.sort(ended), begins, "right")

    waits = (under_way(collectives) > 0) & (under_way(computing) == 0)
    until = np.searchsorted(times, begins, "right")  # the mark that ends the part of a stretch
    waited_until = np.bincount(until, weights=lengths * waits, minlength=len(marks) + 1)
    waited: dict[str, float] = defaultdict(float)
    whole: dict[str, int] = defaultdict(int)
    for i, (_, part) in enumerate(marks[1:], start=1):
        waited[part] += float(waited_until[i])
        whole[part] += int(times[i] - times[i - 1])
    return {part: waited[part] / ns for part, ns in whole.items() if ns > 0}
