"""Small runs of `clean`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_llm.clean.clean_pipeline import clean
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.source import Source


def write(path: Path, texts: list[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(paths: list[Path], out: Path, **settings: Any) -> list[dict[str, str]]:
    """The documents of the output."""
    read = CleanSettings(tuple(map(str, paths)), **settings)
    assert read.problems() == []
    out.mkdir(exist_ok=True)
    clean([Input(Source.local(path), "train", read.read_settings()) for path in paths], read, out)
    return [json.loads(line) for part in sorted(out.glob("part-*")) for line in part.read_bytes().splitlines()]


def kept_numbers(paths: list[Path], out: Path, **settings: Any) -> tuple[list[int], dict[str, Any]]:
    """The numbers of the records that are kept, each in its file, and the report."""
    found = run(paths, out, **settings)
    return [int(one["source"].rpartition(":")[2]) for one in found], json.loads((out / "report.json").read_text())
