"""Progress of a long task: bytes, MB/s and the time that is left, on the terminal and in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lit_llm.core.disk import naming

_SECONDS_BETWEEN_LINES = 30.0


Report = Callable[[int, int], None]
"""A function that takes two numbers since its last call: bytes of sources that were read, and bytes of the text in them."""
_REPORT_BYTES = 2**19  # the number of bytes of text between two reports


class Reading:
    """Reports the progress of reading an input, after every ``_REPORT_BYTES`` of the input's text.

    Args:
        report: called with the bytes of the source and the bytes of text that were read since the last report.
        start: the first byte of the source that is read.
    """

    def __init__(self, report: Report, start: int = 0) -> None:
        self._report, self._position, self._text = report, start, 0

    def add(self, text: int, position: int) -> None:
        """Count ``text`` more bytes of text. ``position``: the byte up to which the source has been read."""
        self._text += text
        if self._text >= _REPORT_BYTES:
            self.end(position)

    def end(self, position: int) -> None:
        """Report the bytes since the last report. ``position``: the byte up to which the source has been read."""
        self._report(max(0, position - self._position), self._text)
        self._position, self._text = max(position, self._position), 0


class ProgressLog:
    """Shows progress: a bar on a terminal, elsewhere a line every 30 seconds. The lines also go to the log file.

    Args:
        log: the log file, to which lines are appended. None: no file.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._console = Console(stderr=True)

    def note(self, text: str) -> None:
        """Append a line with the present time and ``text`` to the log file."""
        if self._log is not None:
            with naming(self._log), open(self._log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    @contextlib.contextmanager
    def stage(self, title: str, *, total: int, done: int = 0, unit: str = "MB of text") -> Iterator[Report]:
        """Context manager around one stage of the work. Yields the `Report` function, which shows progress with name ``title``.

        Args:
            total: bytes of all sources. A source of unknown size counts as 0.
            done: how many of these bytes an earlier run has read.
            unit: the unit of the second argument of the `Report`, for the lines of the log.
        """
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            task = bar.add_task(title, total=total or None, completed=done)
            started = before = time.monotonic()
            source = text = 0  # bytes read in this run
            self.note(f"{title}: {total / 1e6:,.1f} MB{f', of which {done / 1e6:,.1f} MB were read before' if done else ''}")

            def speed() -> str:
                seconds = max(time.monotonic() - started, 1e-9)
                return f"{text / 1e6:,.1f} {unit} in {seconds:,.1f} s, {text / 1e6 / seconds:,.2f} MB/s"

            def report(source_bytes: int, text_bytes: int) -> None:
                nonlocal source, text, before
                source, text = source + source_bytes, text + text_bytes
                bar.advance(task, source_bytes)
                now = time.monotonic()
                if now - before >= _SECONDS_BETWEEN_LINES and source:
                    before = now
                    line = f"{title}: {speed()}"
                    if (left := total - done - source) >= 0:
                        share, seconds = 100 * (done + source) / total, left * (now - started) / source
                        line = f"{title}: {share:.1f} %, {speed()}, {seconds:,.0f} s left"
                    self.note(line)
                    if not self._console.is_terminal:
                        print(line, file=sys.stderr, flush=True)

            yield report
            self.note(f"{title}: finished, {speed()}")
