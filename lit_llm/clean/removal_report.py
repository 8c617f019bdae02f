"""Report which rule removed which documents: counts of each step, and samples, as files and as a table."""

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
"""The name of the step under which the time for reading and writing documents is counted."""
SAMPLES = 20
"""The most removed documents that the report shows for each rule."""
EXCERPT = 300
"""The most characters of a removed document's text that a sample shows."""


@dataclass
class Count:
    documents: int = 0
    bytes: int = 0
    """The number of UTF-8 bytes in the text of the documents."""

    def add(self, other: Count) -> None:
        self.documents += other.documents
        self.bytes += other.bytes


@dataclass
class StepCount:
    """Record of the counts of one step in a call of `clean`: changed and removed documents, and time."""

    changed: int = 0
    """The number of documents that the step changed, but did not remove."""
    seconds: float = 0.0
    """The processor time of the step in seconds."""
    removed: dict[str, Count] = field(default_factory=dict)
    """Rule of the step → the count of the documents that the rule removed."""


@dataclass
class Tally:
    """Record of the counts of documents, bytes and seconds of one call of `clean`, and samples of removed documents."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    without_text: int = 0
    """The number of records whose text is null or empty. Steps do not get these records."""
    not_utf8: int = 0
    """The number of documents with bytes that are not UTF-8. Such bytes are read as U+FFFD."""
    steps: dict[str, StepCount] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Rule → at most ``SAMPLES`` documents that the rule removed, chosen by the smallest hashes of their source names."""

    def step(self, name: str) -> StepCount:
        return self.steps.setdefault(name, StepCount())

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[StepCount]:
        """Context manager that yields the counts of the step ``name``, and adds the block's processor time to these counts."""
        count, started = self.step(name), time.process_time()
        yield count
        count.seconds += time.process_time() - started

    def remove(self, step: str, removed: Removed, document: Document) -> None:
        """Count a document that ``step`` has removed. Keep it as a sample of its rule if the hash of its ``source`` is one of
        the ``SAMPLES`` smallest so far."""
        self.step(step).removed.setdefault(removed.rule, Count()).add(Count(1, len(document.text.encode())))
        sample = {"rule": removed.rule, "detail": removed.detail, "source": document.source}
        sample |= {} if removed.secret else {"excerpt": document.text[:EXCERPT]}  # no sample shows a secret
        self.samples[removed.rule] = sorted([*self.samples.get(removed.rule, []), sample], key=_source_hash)[:SAMPLES]


def _source_hash(sample: dict[str, str]) -> bytes:
    return hashlib.blake2b(sample["source"].encode(), digest_size=8).digest()


def write_report(out: Path, settings: CleanSettings, tally: Tally) -> None:
    """Write the counts to ``report.json``, and the samples of removed documents to ``removed.jsonl``, one sample per line."""
    content: dict[str, Any] = asdict(tally)
    samples = content.pop("samples")
    public = {name: [public_name(path) for path in getattr(settings, name)] for name in ("paths", "against")}
    # The report is one line, so that a reader of JSONL refuses this file instead of taking it for text.
    write_text(out / REPORT, json.dumps({"settings": asdict(settings) | public, **content}, ensure_ascii=False) + "\n")
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for rule in sorted(samples) for sample in samples[rule]]
    write_text(out / REMOVED, "".join(lines))


def table(tally: Tally) -> Iterator[str]:
    """Yield the lines of a table for the terminal: the documents that each step and rule removed, and each step's time."""
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
    documents, sizes = zip((0, 0), *((-count.documents, -count.bytes) for count in counts), strict=True)
    return Count(sum(documents), sum(sizes))


def _row(name: str, count: Count, seconds: float | None = None) -> str:
    size = round(count.bytes / 1e6, 2) + 0.0  # no -0.00
    return f"{name:40s} {count.documents:12,} {size:10,.2f} {'' if seconds is None else f'{seconds:,.2f}':>12s}".rstrip()
