"""What was removed by which rule, as files and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.tally import READ, Count, Tally
from lit_llm.core.disk import write_text
from lit_llm.ingest.source import public_name

REPORT, REMOVED = "report.json", "removed.jsonl"


def write_report(out: Path, settings: CleanSettings, tally: Tally) -> None:
    """Write the counts, and samples of removed documents, a line each."""
    content: dict[str, Any] = tally.to_json()
    samples = content.pop("samples")
    shown = asdict(settings) | {"paths": [public_name(path) for path in settings.paths]}
    # On one line: a reader of JSONL that meets this file refuses it, instead of taking it for text.
    write_text(out / REPORT, json.dumps({"settings": shown, **content}, ensure_ascii=False) + "\n")
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
    found = list(counts)
    return Count(-sum(count.documents for count in found), -sum(count.bytes for count in found))


def _row(name: str, count: Count, seconds: float | None = None) -> str:
    size = round(count.bytes / 1e6, 2) + 0.0  # no -0.00
    return f"{name:40s} {count.documents:12,} {size:10,.2f} {'' if seconds is None else f'{seconds:,.2f}':>12s}".rstrip()
