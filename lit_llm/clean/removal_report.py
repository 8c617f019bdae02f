"""What was removed by which rule: counts of each step and samples, as files and as a table."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.rules import Document, Removed
from lit_llm.core.disk import write_text
from lit_llm.ingest.paths import REMOVED, REPORT
from lit_llm.ingest.source import public_name

READ = "read"
"""The name of reading and writing among the steps."""
SAMPLES = 20
"""Of each rule, the report shows at most this many removed documents."""
EXCERPT = 300
"""Characters of a sample."""


@dataclass
class Count:
    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the text."""

    def add(self, other: Count) -> None:
        self.documents += other.documents
        self.bytes += other.bytes


@dataclass
class StepCount:
    """What one step did."""

    changed: int = 0
    """Documents that it kept with another text."""
    seconds: float = 0.0
    """Of processor time."""
    removed: dict[str, Count] = field(default_factory=dict)
    """By rule."""


@dataclass
class Tally:
    """Of one job, or the sum of several."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    without_text: int = 0
    """Records whose text is null or empty, and that no step has seen."""
    not_utf8: int = 0
    """Documents with bytes that are not UTF-8, which are read as U+FFFD."""
    steps: dict[str, StepCount] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Of each rule, the removed documents whose source has the smallest hash: a random choice, the same in every order."""

    def step(self, name: str) -> StepCount:
        return self.steps.setdefault(name, StepCount())

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[StepCount]:
        """Add the processor time of a block to a step."""
        count, started = self.step(name), time.process_time()
        yield count
        count.seconds += time.process_time() - started

    def remove(self, step: str, removed: Removed, document: Document) -> None:
        """Count a document that a step has removed, and keep it as a sample if its hash is among the smallest."""
        self.step(step).removed.setdefault(removed.rule, Count()).add(Count(1, len(document.text.encode())))
        self.samples[removed.rule] = _smallest([*self.samples.get(removed.rule, []), sample_of(removed, document)])

    def add(self, other: Tally) -> None:
        """Add the counts and samples of another job. What is kept of all is known later."""
        self.read.add(other.read)
        self.without_text += other.without_text
        self.not_utf8 += other.not_utf8
        for name, found in other.steps.items():
            own = self.step(name)
            own.changed += found.changed
            own.seconds += found.seconds
            for rule, count in found.removed.items():
                own.removed.setdefault(rule, Count()).add(count)
        for rule, samples in other.samples.items():
            self.samples[rule] = _smallest([*self.samples.get(rule, []), *samples])


def sample_of(removed: Removed, document: Document) -> dict[str, str]:
    """What a line of the samples holds. No excerpt shows what was removed because it is secret."""
    sample = {"rule": removed.rule, "detail": removed.detail, "source": document.source}
    return sample if removed.secret else sample | {"excerpt": document.text[:EXCERPT]}


def _smallest(samples: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(samples, key=lambda sample: hashlib.blake2b(sample["source"].encode(), digest_size=8).digest())[:SAMPLES]


def write_report(out: Path, settings: CleanSettings, tally: Tally) -> None:
    """Write the counts, and samples of removed documents, a line each."""
    content: dict[str, Any] = asdict(tally)
    samples = content.pop("samples")
    public = {name: [public_name(path) for path in getattr(settings, name)] for name in ("paths", "against")}
    # On one line: a reader of JSONL that meets this file refuses it, instead of taking it for text.
    write_text(out / REPORT, json.dumps({"settings": asdict(settings) | public, **content}, ensure_ascii=False) + "\n")
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for rule in sorted(samples) for sample in samples[rule]]
    write_text(out / REMOVED, "".join(lines))


def table(tally: Tally) -> Iterator[str]:
    """Lines for the terminal."""
    yield f"{'':40s} {'documents':>12s} {'MB':>10s} {'cpu-seconds':>12s}"
    for name, step in tally.steps.items():
        if name == READ:
            yield _row("read", tally.read, step.seconds)
            continue
        changed = f", {step.changed:,} changed" if step.changed else ""
        yield _row(f"{name}{changed}", _negative(step.removed.values()), step.seconds)
        for rule, count in sorted(step.removed.items()):
            if rule != name:
                yield _row(f"  {rule}", _negative([count]))
    yield _row("kept", tally.kept)
    if tally.without_text:
        yield f"skipped: {tally.without_text:,} records without text"
    if tally.not_utf8:
        yield f"not UTF-8: {tally.not_utf8:,} documents, whose invalid bytes are read as U+FFFD"


def _negative(counts: Iterable[Count]) -> Count:
    total = Count()
    for count in counts:
        total.add(count)
    return Count(-total.documents, -total.bytes)


def _row(name: str, count: Count, seconds: float | None = None) -> str:
    size = round(count.bytes / 1e6, 2) + 0.0  # no -0.00
    return f"{name:40s} {count.documents:12,} {size:10,.2f} {'' if seconds is None else f'{seconds:,.2f}':>12s}".rstrip()
