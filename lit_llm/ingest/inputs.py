"""The inputs to tokenise: whole sources, or parts of plain text files. All documents of an input may have the same split."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_llm.ingest.readers import ReadSettings
from lit_llm.ingest.source import Source

JOB_BYTES = 2**24
"""The approximate size of a job in bytes. Consecutive small inputs are tokenised as one job, so small files cost little."""


@dataclass(frozen=True)
class Input:
    """Record of an input to tokenise: a source (file, or shard of a dataset), or the bytes [start, stop) of plain text."""

    source: Source
    split: str | None
    """"train", "val" or "test". None: the text of each document decides whether it is held out."""
    settings: ReadSettings = field(default_factory=ReadSettings)
    start: int = 0
    stop: int | None = None
    """The byte after the last byte that is read. None: the source is read to its end."""

    @classmethod
    def of_file(cls, path: Path, split: str) -> Input:
        """Make the input for a whole plain text file of this machine, whose documents all belong to ``split``."""
        return cls(Source.local(path), split, ReadSettings(format="text"))

    @property
    def size(self) -> int:
        """The number of bytes of the source that are read."""
        return (self.source.size if self.stop is None else self.stop) - self.start

    def identity(self) -> list[str | int | None]:
        """Values for a cache key. The values of two inputs differ if their documents, or a document's split, may differ."""
        source, read = self.source, self.settings
        path = os.path.abspath(source.path) if source.is_local else source.path
        return [path, source.size, source.version, self.split, *read.identity(), self.start, self.stop]


@dataclass(frozen=True)
class Job:
    """Record of a job: consecutive inputs that one worker tokenises, one after the other."""

    inputs: tuple[Input, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.inputs)

    def key(self, settings: Iterable[str]) -> str:
        """The name of the files with the job's result: a hash of the inputs, and of ``settings`` that the result depends on."""
        content = [[part.identity() for part in self.inputs], list(settings)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def jobs_of(inputs: Sequence[Input]) -> Iterator[Job]:
    """Group all inputs, in their order, into jobs of ``JOB_BYTES`` or more; only the last job may be smaller. Yield the jobs,
    which do not depend on the number of workers."""
    collected: list[Input] = []
    size = 0
    for part in inputs:
        collected.append(part)
        size += part.size if part.source.size else JOB_BYTES  # a source of unknown size may be large
        if size >= JOB_BYTES:
            yield Job(tuple(collected))
            collected, size = [], 0
    if collected:
        yield Job(tuple(collected))
