"""Reads `.metadata` of torch.distributed.checkpoint (DCP) without executing it.

That file is a pickle, which can call any function when it is loaded. The unpickler here makes only plain values, and empty
classes in place of torch's metadata classes. It refuses every other name in the pickle before calling it.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_llm.core.disk import naming
from lit_llm.core.errors import UserError, library_errors

METADATA = ".metadata"

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_OF_METADATA = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta"),
)
_RECORDS = {  # metadata classes, as (module, name), whose attributes are read
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # up to torch 2.2
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ENCODINGS = {  # enumerations and layouts, whose values are not needed
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "PurePosixPath")}


class StoredBytes(NamedTuple):
    """Record of a range of bytes in a file: `length` bytes from byte `start` on."""

    file: Path
    start: int
    length: int


class StoredTensor(NamedTuple):
    """Record of a tensor in pieces. A piece is (its offset in each dimension of the tensor, its shape, its bytes)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], StoredBytes]]


Content = tuple[dict[str, StoredTensor], dict[str, StoredBytes], dict[str, tuple[Any, ...]]]
"""Content of a DCP folder: (name → tensor, name → bytes of a value that is no tensor, name → keys in the saved nested dict)."""


def read_metadata(folder: Path) -> Content:
    """(name → tensor, name → bytes of another value, name → keys in the saved nested dict) from `.metadata` of a DCP folder.

    The places of the values are checked against the names and sizes of the files in the folder. No tensor is read.

    Raises:
        UserError: `.metadata` is missing or damaged, would execute something, or names a file that is missing, too short
            or outside the folder.
    """
    what = f"{folder / METADATA} is damaged, or not the metadata of torch.distributed.checkpoint"
    with naming(folder / METADATA), library_errors(what), open(folder / METADATA, "rb") as file:
        return _checked(_Reader(file, folder).load(), folder)


class _Record:
    """Stands in for a metadata class of DCP. An object gets the attributes in the pickle, and has none of DCP's methods."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # TensorProperties saves a tuple, which begins with the dtype
            self.dtype = state[0]


class _Reader(pickle.Unpickler):
    """An unpickler that knows only the classes that DCP writes into `.metadata`, and refuses all others with a UserError."""

    def __init__(self, file: Any, folder: Path) -> None:
        super().__init__(file)
        self.folder = folder
        # A pickle can set attributes of the classes that it names. So each reader makes its own classes.
        self.known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in _RECORDS}
        # Python 3.11.0 to 3.11.3 pickle an enum member as getattr(class, name).
        self.known |= dict.fromkeys((*_ENCODINGS, ("builtins", "getattr")), lambda *_: None)
        self.known |= dict.fromkeys(_PATHS, lambda *parts: "/".join(map(str, parts)))
        self.known |= {("torch", name): dtype for name, dtype in _DTYPES.items()}
        self.known |= {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise UserError(
                f"{self.folder / METADATA} is refused, because loading it would run {module}.{name}: only the metadata classes "
                "of torch.distributed.checkpoint are read"
            )
        return self.known[module, name]


def _checked(content: Any, folder: Path) -> Content:
    stored: dict[tuple[str, tuple[int, ...] | None], StoredBytes] = {}
    for index, info in content.storage_data.items():
        offset = vars(index).get("offset")  # None for values that are no tensors
        stored[index.fqn, None if offset is None else _numbers(offset)] = _place(index.fqn, info, folder)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredBytes] = {}
    for name, entry in content.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            values[name] = stored[name, None]
            continue
        dtype = entry.properties.dtype
        assert isinstance(dtype, torch.dtype)
        pieces = []
        for chunk in entry.chunks:
            offset, shape = _numbers(chunk.offsets), _numbers(chunk.sizes)
            pieces.append((offset, shape, stored[name, offset]))
        tensors[name] = StoredTensor(_numbers(entry.size), dtype, pieces)
        _refuse_incomplete(name, tensors[name], folder)
    paths = content.planner_data if isinstance(content.planner_data, dict) else {}
    return tensors, values, {name: tuple(path) for name, path in paths.items()}


def _refuse_incomplete(name: str, tensor: StoredTensor, folder: Path) -> None:
    """Raise a UserError unless the pieces cover the whole tensor, and each piece has as many bytes as its values need."""
    inside = all(
        len(offset) == len(shape) == len(tensor.shape)
        and all(first + size <= whole for first, size, whole in zip(offset, shape, tensor.shape, strict=True))
        and math.prod(shape) * tensor.dtype.itemsize <= place.length
        for offset, shape, place in tensor.pieces
    )
    if not inside or sum(math.prod(shape) for _, shape, _ in tensor.pieces) != math.prod(tensor.shape):
        raise UserError(f"{folder / METADATA}: the pieces of {name} are not the whole tensor")


def _place(name: str, info: Any, folder: Path) -> StoredBytes:
    if vars(info).get("transform_descriptors"):
        raise UserError(f"{folder} holds {name} compressed ({info.transform_descriptors}): save it again without extensions")
    start, length = _numbers((info.offset, info.length))
    file = folder / info.relative_path
    if Path(info.relative_path).is_absolute() or ".." in Path(info.relative_path).parts:
        raise UserError(f"{folder / METADATA} names {info.relative_path}, a file outside the folder")
    if not file.is_file():
        raise UserError(f"{file} is missing, but {METADATA} lists it")
    if start + length > file.stat().st_size:
        raise UserError(f"{file} is truncated: {METADATA} expects {name} at bytes {start:,} to {start + length:,}")
    return StoredBytes(file, start, length)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected sizes, got {numbers}")
    return numbers
