"""Read datasets of the Hugging Face hub by name, with the package `datasets`, which lists their shards and streams the rows.

A name is `hub:OWNER/NAME?name=CONFIG&split=SPLIT&revision=REVISION`; the split is `train` if none is given. In place of
OWNER/NAME there may be a local folder, which `datasets` reads by its own rules.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlencode

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.jsonl import document_of
from lit_llm.ingest.readers.messages import BESIDE, without_null
from lit_llm.ingest.readers.text_value import missing_key
from lit_llm.ingest.remote_errors import one_sentence
from lit_llm.ingest.source import HUB, Source, changed

_ANSWER_SECONDS = 20
_SHARD = re.compile(r"#shard=(\d+)$")


@dataclasses.dataclass(frozen=True)
class _Name:
    """Record of the parts of the name of a dataset on the hub. If the user left out a part, split is "train", others None."""

    dataset: str
    config: str | None
    split: str
    revision: str | None

    @classmethod
    def read(cls, path: str) -> _Name:
        dataset, _, query = _SHARD.sub("", path).removeprefix(HUB).partition("?")
        options = dict(parse_qsl(query))
        unknown = sorted(options.keys() - {"name", "split", "revision"})
        if unknown or not dataset:
            what = f"has the unknown option {unknown[0]!r}" if unknown else "names no dataset"
            raise UserError(f"{path} {what}: write hub:OWNER/NAME?name=CONFIG&split=SPLIT&revision=REVISION.")
        name = cls(dataset, options.get("name"), options.get("split", "train"), options.get("revision"))
        if name.folder and not name.folder.is_dir():
            raise UserError(f"{path} is no folder: check its path.")
        if name.folder and name.revision:
            raise UserError(f"{path} is a folder, which has no revisions: remove revision={name.revision}.")
        return name

    @property
    def folder(self) -> Path | None:
        """The local folder that ``dataset`` names; None if ``dataset`` is the name of a dataset on the hub."""
        folder = Path(self.dataset).expanduser().absolute()
        return folder if folder.is_dir() or self.dataset.startswith((".", "/", "~")) else None

    def __str__(self) -> str:
        options = {"name": self.config, "split": self.split, "revision": self.revision}
        return f"{HUB}{self.dataset}?{urlencode({key: value for key, value in options.items() if value})}"


def list_hub(pattern: str) -> list[Source]:
    """The shards of the dataset that ``pattern`` names, at the present commit of the given revision.

    Raises:
        UserError: The dataset cannot be read, or the split or the configuration does not exist.
    """
    name = _Name.read(pattern)
    if name.folder is None:
        name = dataclasses.replace(name, revision=_commit(name))
    stream, version, size = _open(name)
    count = stream.num_shards
    return [Source(f"{name}#shard={index}", size // count, version) for index in range(count)]


def read_hub(source: Source, of: SourceFile) -> Iterator[Piece]:
    """Yield the documents of one shard, in pieces. ``of.fraction`` stays 0, because the share of rows read is not known.

    Raises:
        UserError: The dataset cannot be read, has changed since it was listed, or has no text under the key.
    """
    match = _SHARD.search(source.path)
    assert match
    of.fraction = 0.0
    stream, version, _ = _open(_Name.read(source.path))
    if version != source.version:
        raise changed(source)
    if stream.features is not None:
        column = of.key if of.key in stream.features else of.key.partition(".")[0]
        if column not in stream.features:
            raise missing_key(source.path, of.key, stream.features, what="messages" if of.messages else "text")
        beside = [name for name in BESIDE if of.messages and name in stream.features and name != column]
        stream = stream.select_columns([column, *beside])
    with one_sentence(source.path):
        for number, row in enumerate(stream.shard(stream.num_shards, int(match[1])), start=1):
            yield from document_of(without_null(row), of, where=f"Row {number} of {source.path}")


def _commit(name: _Name) -> str:
    """The hash of the present commit of a dataset, from one request: `datasets` would repeat a failed request for 30 s."""
    hub = need("huggingface_hub", what=str(name))
    with one_sentence(str(name)):
        return str(hub.HfApi().dataset_info(name.dataset, revision=name.revision, timeout=_ANSWER_SECONDS).sha)


def _open(name: _Name) -> tuple[Any, str, int]:
    """(streaming dataset of a split; version, a hash that changes with the data; size of the split in bytes, 0 if unknown)."""
    return _load(name) if name.folder else _load_once(name)


def _load(name: _Name) -> tuple[Any, str, int]:
    datasets = _datasets(name)
    path = str(name.folder or name.dataset)
    with one_sentence(str(name)):
        try:
            builder = datasets.load_dataset_builder(path, name=name.config, revision=name.revision)
        except FileNotFoundError as error:
            if name.folder is None:
                raise
            raise UserError(f"{name} has no file that the package datasets reads: check the folder.") from error
        except ValueError as error:
            known = datasets.get_dataset_config_names(path, revision=name.revision)
            if name.config in known or (name.config is None and len(known) == 1):
                raise
            given = f"has no configuration {name.config!r}" if name.config else "has several configurations"
            raise UserError(f"{name} {given}: give ?name= one of {', '.join(known)}.") from error
    splits = [str(split) for split in builder.config.data_files or builder.info.splits or {}]
    if name.split not in splits:
        raise UserError(f"{name} has no split {name.split!r}: give ?split= one of {', '.join(splits)}.")
    stream = builder.as_streaming_dataset(split=name.split)
    files = (builder.config.data_files or {}).get(name.split, [])
    state = repr((name.revision, builder.config_id, [*files], getattr(files, "origin_metadata", None)))
    info = (builder.info.splits or {}).get(name.split)
    return stream, hashlib.blake2b(state.encode(), digest_size=16).hexdigest(), (info and info.num_bytes) or 0


_load_once = functools.lru_cache(maxsize=8)(_load)  # at a fixed commit, nothing changes


def _datasets(name: _Name) -> ModuleType:
    """Import and return the package `datasets`, without torch, which would take 180 MB of memory in each worker."""
    before = os.environ.get("USE_TORCH")
    os.environ["USE_TORCH"] = "0"
    try:
        datasets = need("datasets", what=str(name))
    finally:
        if before is None:
            del os.environ["USE_TORCH"]
        else:
            os.environ["USE_TORCH"] = before
    datasets.disable_progress_bars()
    return datasets
