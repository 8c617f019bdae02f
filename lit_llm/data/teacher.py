"""What a teacher gives to the positions of a training stream, for distillation: files beside its shards.

``train_000000.teacher`` belongs to ``train_000000.bin``. For each token of the shard it has k ids (uint16, or uint32 for more
than 65,536 ids), the likeliest first, and the k log-probabilities (float16) that they follow. These are below 0: 0 says that no
block has this position. ``train_teacher.json`` is a `TeacherInfo`. It is written last: without it, nothing is read.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lit_llm.core.disk import open_ordinary, read_json, write_text
from lit_llm.core.errors import UserError
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.shard_layout import ShardLayout
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import Unexpected, from_json

HIGHEST, LOWEST = -(2.0**-24), -65504.0
"""Of log-probabilities: the least that float16 has below 0, and its largest."""


@dataclass(frozen=True)
class TeacherInfo:
    """What the files are."""

    weights: str
    """`base_sha256` of the teacher's checkpoint."""
    vocab_size: int
    top_k: int
    temperature: float
    """Of the probabilities."""
    block_size: int
    packing: str
    """With the block size, what the teacher has read before each position."""
    tokens: str
    """Hash of the stream (`TokenStream.scan`)."""

    @property
    def record(self) -> np.dtype:
        """What the files have for each position."""
        ids = "<u2" if self.vocab_size <= 2**16 else "<u4"
        return np.dtype([("ids", ids, (self.top_k,)), ("logp", "<f2", (self.top_k,))])


def info_path(stream: TokenStream) -> Path:
    """The name of the JSON file, after the first shard."""
    first = stream.paths[0]
    return first.with_name(f"{re.sub('_[0-9]+$', '', first.stem)}_teacher.json")


def read_info(path: Path) -> TeacherInfo | None:
    """Raises:
    UserError: It is damaged.
    """
    try:
        info: TeacherInfo = from_json(TeacherInfo, read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, Unexpected) as error:
        raise UserError(f"{path} is damaged ({error}): {_AGAIN}.") from error
    return info


class Teacher:
    """The files of a stream. Pickling transfers no content.

    Args:
        tokens, vocab_size, block_size, packing: of the stream and its blocks: as the teacher's.

    Raises:
        UserError: There is no teacher, or one of other tokens or blocks; or a file is damaged.
    """

    def __init__(self, stream: TokenStream, *, tokens: str, vocab_size: int, block_size: int, packing: str) -> None:
        self.stream, path = stream, info_path(stream)
        if (info := read_info(path)) is None:
            raise UserError(
                f"The data have no teacher: there is no {path} (prepare --teacher RUN --data TokenShards --data.path "
                f"{path.parent}, and the same path for fit)."
            )
        self.info, self._files = info, OpenFiles()
        if info.tokens != tokens:
            raise UserError(f"{path} is about other tokens than the shards beside it: {_AGAIN}.")
        if info.vocab_size != vocab_size:
            raise UserError(f"{path} is of a teacher with {info.vocab_size} ids, but the data have {vocab_size}: {_AGAIN}.")
        if (info.block_size, info.packing) != (block_size, packing):
            raise UserError(
                f"{path} is of a teacher that has read blocks of {info.block_size} tokens, {info.packing}, and these are of "
                f"{block_size}, {packing} (--data.block_size {info.block_size} --data.packing {info.packing}, or {_AGAIN})."
            )
        for layout in stream.layouts:
            size, expected = _size(file_of(layout)), layout.tokens * info.record.itemsize
            if size != expected:
                raise UserError(f"{file_of(layout)} has {size} bytes, but must have {expected}: {_AGAIN}.")

    def read(self, start: int, length: int) -> np.ndarray:
        """(length,) of type `TeacherInfo.record`, at the positions from `start` on.

        Raises:
            UserError: A file is damaged.
        """
        record, parts, path = self.info.record, [], ""
        for shard, first, count in self.stream.places(start, length):
            path = file_of(self.stream.layouts[shard])
            parts.append(self._files.read(path, first * record.itemsize, count * record.itemsize, random=True))
        found = np.frombuffer(b"".join(parts), dtype=record)
        if found["ids"].max() >= self.info.vocab_size or not (found["logp"] <= 0).all():
            raise UserError(f"{path} is damaged: {_AGAIN}.")
        return found


class TeacherWriter:
    """Writes the files beside their places, and puts them there when all are complete.

    If the files of an interrupted writer with the same `info` are there, it goes on with them.

    Attributes:
        done: the number of blocks that they have. Keep it up to date.
    """

    def __init__(self, stream: TokenStream, info: TeacherInfo) -> None:
        self._stream, self._info, self._path = stream, info, info_path(stream)
        self._partial = self._path.with_name(f".{self._path.name}.unfinished")
        self._names = {file_of(layout): file_of(layout) + ".partial" for layout in stream.layouts}
        sizes = [layout.tokens * info.record.itemsize for layout in stream.layouts]
        saved = read_json(self._partial) if self._partial.exists() else {}
        kept = saved.pop("done", 0) if list(map(_size, self._names.values())) == sizes else 0
        self.done = kept if saved == asdict(info) else 0
        new = 0 if self.done else os.O_TRUNC
        self._files = [open_ordinary(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | new) for name in self._names.values()]
        for file, size in zip(self._files, sizes, strict=True):
            os.ftruncate(file, size)

    def write(self, start: int, ids: np.ndarray, logp: np.ndarray) -> None:
        """Write what was given to the positions from `start` on: (n, k) each."""
        records = np.empty(len(ids), dtype=self._info.record)
        records["ids"], records["logp"] = ids, logp.clip(LOWEST, HIGHEST)
        for shard, first, count in self._stream.places(start, len(ids)):
            os.pwrite(self._files[shard], records[:count].tobytes(), first * records.itemsize)
            records = records[count:]

    def save(self) -> None:
        """Remember what is written, to go on from there."""
        for file in self._files:
            os.fsync(file)
        write_text(self._partial, json.dumps(asdict(self._info) | {"done": self.done}))

    def finish(self) -> None:
        self.save()
        self._path.unlink(missing_ok=True)  # first: it is about older files
        for (name, partial), file in zip(self._names.items(), self._files, strict=True):
            os.close(file)
            os.replace(partial, name)
        write_text(self._path, json.dumps(asdict(self._info), indent=1) + "\n")
        self._partial.unlink()


_AGAIN = "write the teacher's again (prepare --teacher RUN --data TokenShards --data.path DIR --replace true)"


def file_of(layout: ShardLayout) -> str:
    """The name of the file of a shard."""
    return os.path.splitext(layout.path)[0] + ".teacher"


def _size(path: str) -> int:
    """Bytes of a file; -1 without one."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
