"""Reads a folder of torch.distributed.checkpoint (DCP), such as torchtitan's and Lightning's, on one process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_llm.checkpoint.dcp_metadata import METADATA, StoredBytes, read_metadata
from lit_llm.core.errors import UserError, library_errors

_LIGHTNING = "meta.pt"
"""The file of a DCP folder in which Lightning saves the values of a checkpoint that are not tensors."""


def is_dcp_folder(folder: Path) -> bool:
    """Whether a folder was written by torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


class DcpFolder:
    """Reads a folder of torch.distributed.checkpoint (DCP): `folder[name]` is a tensor. No code in the folder is executed.

    Raises:
        UserError: the folder is damaged or incomplete, or its pickles hold more than tensors, plain values and metadata.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors, self._values, self._paths = read_metadata(folder)
        self.files: dict[str, Path] = {name: folder for name in self._tensors}
        """Tensor name → the path of the DCP folder, which is the same for all tensors."""

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, pieces = self._tensors[name]
        whole = torch.empty(shape, dtype=dtype)
        for offset, size, place in pieces:
            piece = self._load(place, name)
            if not isinstance(piece, Tensor) or tuple(piece.shape) != size or piece.dtype != dtype:
                raise UserError(f"{place.file}: {name} is not as {METADATA} describes it")
            whole[tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))] = piece
        return whole

    def value(self, key: str) -> Any:
        """The value, such as a number or a nested dict, under the top-level `key` of the saved dict; None without this key."""
        if (self.folder / _LIGHTNING).is_file():
            beside = self._load(StoredBytes(self.folder / _LIGHTNING, 0, (self.folder / _LIGHTNING).stat().st_size), key)
            if isinstance(beside, dict) and key in beside:
                return beside[key]
        tree: dict[str, Any] = {}
        for name, place in self._values.items():
            path = self._paths.get(name, (name,))
            if path[0] == key:
                level = tree
                for step in path[:-1]:
                    level = level.setdefault(step, {})
                level[path[-1]] = self._load(place, name)
        return tree.get(key)

    def _load(self, place: StoredBytes, name: str) -> Any:
        with open(place.file, "rb") as file:
            file.seek(place.start)
            content = io.BytesIO(file.read(place.length))
        with library_errors(f"{place.file}: {name} is damaged or holds more than tensors and plain values"):
            return torch.load(content, map_location="cpu", weights_only=True)
