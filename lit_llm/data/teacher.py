"""A teacher model's predictions at the positions of a training stream, for distillation, in files beside the stream's shards.

``train_000000.teacher`` belongs to ``train_000000.bin``. For each token of the shard it has the k ids that are likeliest to
follow the token, the likeliest first (uint16, or uint32 if the vocabulary has more than 65,536 ids), and then their
log-probabilities (float16). Log-probabilities are below 0; 0 marks a position that no block reads. ``train_teacher.json`` has
the `TeacherInfo`, and is written last: without this file, the ``.teacher`` files are not read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.core.disk import read_json, write_text
from lit_llm.core.errors import UserError
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.shard_layout import ShardLayout
from lit_llm.data.stored_files import StoredFile, hash_of
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import Unexpected, from_json

HIGHEST, LOWEST = -(2.0**-24), -65504.0
"""Limits of stored log-probabilities: the float16 number below 0 that is nearest to 0, and the lowest float16 number."""


@dataclass(frozen=True)
class TeacherInfo:
    """The settings with which the files with a teacher's predictions were made, and the hashes of the files."""

    weights: str
    """A hash of the teacher's weights: `base_sha256` of its checkpoint."""
    vocab_size: int
    top_k: int
    temperature: float
    """The number by which the teacher's logits were divided before the softmax."""
    block_size: int
    packing: str
    """"concatenate" or "best_fit". Packing and block size decide which tokens the teacher has read before each position."""
    tokens: str
    """The hash of the stream's tokens (`TokenStream.scan`)."""
    files: dict[str, str]
    """Name of each ``.teacher`` file → BLAKE2b hash (hex) of its content."""

    @property
    def name(self) -> str:
        """Text that identifies the teacher: start of its weights' hash, k and temperature. Checkpoints store this text."""
        return f"{self.weights[:16]}, top {self.top_k} at {self.temperature:g}"

    @property
    def record(self) -> np.dtype:
        """The numpy dtype of the record that a ``.teacher`` file has for each position: ids (k,), log-probabilities (k,)."""
        ids = "<u2" if self.vocab_size <= 2**16 else "<u4"
        return np.dtype([("ids", ids, (self.top_k,)), ("logp", "<f2", (self.top_k,))])


def info_path(stream: TokenStream) -> Path:
    """The path of the JSON file with the `TeacherInfo` of a stream, named after its first shard: ``train_teacher.json``."""
    first = stream.paths[0]
    return first.with_name(f"{re.sub('_[0-9]+$', '', first.stem)}_teacher.json")


def read_info(path: Path) -> TeacherInfo | None:
    """Read a JSON file with a `TeacherInfo`; None if there is no file.

    Raises:
        UserError: The file is damaged.
    """
    try:
        info: TeacherInfo = from_json(TeacherInfo, read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, Unexpected) as error:
        raise UserError(f"{path} is damaged ({error}): {_AGAIN}.") from error
    return info


class Teacher:
    """Reads a teacher model's predictions for a token stream from files beside its shards. Pickling transfers no predictions.

    Args:
        expected: name of a field of `TeacherInfo` → the value that the field must have for this stream and its blocks.

    Raises:
        UserError: There are no files of a teacher, the files were made for other tokens or blocks, or a file is damaged.
    """

    def __init__(self, stream: TokenStream, expected: Mapping[str, Any]) -> None:
        path = info_path(stream)
        if (info := read_info(path)) is None:
            raise UserError(f"The data have no teacher, {path} is missing: {_AGAIN}.")
        self.stream, self.info, self._files = stream, info, OpenFiles()
        for name, value in expected.items():
            if (of_teacher := getattr(info, name)) != value:
                mend = "" if name == "tokens" else f"set --data.{name} {of_teacher}, or "
                raise UserError(f"{path} is for data with {name} {of_teacher}, but these have {value}: {mend}{_AGAIN}.")
        for layout in stream.layouts:
            file, size = file_of(layout), layout.tokens * info.record.itemsize
            if not os.path.exists(file) or os.path.getsize(file) != size:
                raise UserError(f"{file} does not have {size} bytes: {_AGAIN}.")

    def files(self) -> Iterator[StoredFile]:
        for layout in self.stream.layouts:
            file = file_of(layout)
            yield StoredFile(file, self.info.files.get(os.path.basename(file)), mend=_AGAIN)

    def read(self, start: int, length: int) -> np.ndarray:
        """Read the teacher's predictions for `length` positions of the stream from `start` on.

        Returns an array (length,) of dtype `TeacherInfo.record`: k ids and log-probabilities for each position.

        Raises:
            UserError: A file is damaged, is gone, or became shorter.
        """
        record, parts, path = self.info.record, [], ""
        for shard, first, count in self.stream.places(start, length):
            path = file_of(self.stream.layouts[shard])
            parts.append(self._files.read(path, first * record.itemsize, count * record.itemsize, random=True))
        records = np.frombuffer(b"".join(parts), dtype=record)
        if records["ids"].max() >= self.info.vocab_size or not (records["logp"] <= 0).all():
            raise UserError(f"{path} is damaged: {_AGAIN}.")
        return records


class TeacherWriter:
    """Context manager that writes a teacher's predictions to temporary files, which `finish` renames to their final names.

    Temporary files that `finish` has not renamed are deleted when the context ends."""

    def __init__(self, stream: TokenStream, info: TeacherInfo) -> None:
        self._stream, self._info = stream, info
        self._files: dict[str, int] = {}  # descriptors by name
        for layout in stream.layouts:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._files[file_of(layout)] = file = os.open(file_of(layout) + ".partial", flags, 0o644)
            os.ftruncate(file, layout.tokens * info.record.itemsize)

    def write(self, start: int, ids: np.ndarray, logp: np.ndarray) -> None:
        """Write the predictions for n positions of the stream from `start` on: `ids` (n, k), and log-probabilities `logp`
        (n, k), which are clipped to negative float16 numbers."""
        records = np.empty(len(ids), dtype=self._info.record)
        records["ids"], records["logp"] = ids, logp.clip(LOWEST, HIGHEST)
        for shard, first, count in self._stream.places(start, len(ids)):
            file = self._files[file_of(self._stream.layouts[shard])]
            content, at = records[:count].tobytes(), first * records.itemsize
            while content:  # a disk that is almost full takes a part
                written = os.pwrite(file, content, at)
                content, at = content[written:], at + written
            records = records[count:]

    def finish(self) -> None:
        path = info_path(self._stream)
        path.unlink(missing_ok=True)  # this JSON file describes older files
        for name, file in self._files.items():
            os.fsync(file)
            os.replace(name + ".partial", name)
        hashes = {os.path.basename(name): hash_of(name) for name in self._files}
        write_text(path, json.dumps(asdict(replace(self._info, files=hashes)), indent=1) + "\n")

    def __enter__(self) -> TeacherWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for name, file in self._files.items():
            os.close(file)
            Path(name + ".partial").unlink(missing_ok=True)


_AGAIN = "write it (prepare --teacher RUN --data TokenShards --data.path DIR --replace true)"


def file_of(layout: ShardLayout) -> str:
    """The path of the file with the teacher's predictions for the shard ``layout``."""
    return os.path.splitext(layout.path)[0] + ".teacher"
