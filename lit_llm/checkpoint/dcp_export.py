"""Writes a checkpoint as a folder of torch.distributed.checkpoint (DCP), for programs that load only this format."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lit_llm.checkpoint.placeholders import replaced
from lit_llm.checkpoint.sharded import TensorOnDisk


def write_dcp(checkpoint: dict[str, Any], folder: Path) -> int:
    """Write a checkpoint to `folder`, which must be empty or new; return the number of tensors in it.

    `dcp.load` finds each tensor under its keys in `checkpoint`. DCP joins nested keys by dots, and writes numbers as text.

    Only one tensor at a time is in memory: torch's writer keeps all tensors of a file in memory until it has written the file,
    so each tensor gets a file of its own. One more file has all values that are not tensors.

    Args:
        checkpoint: Lightning's dict. Each tensor in it is memory-mapped or a `TensorOnDisk`.
    """
    on_disk: dict[int, TensorOnDisk] = {}

    def without_data(name: str, value: Any) -> Any:
        if not isinstance(value, TensorOnDisk):
            return value
        meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
        on_disk[id(meta)] = value
        return meta

    planned = replaced(checkpoint, without_data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        saved = dcp.save(planned, storage_writer=_Writer(folder), planner=_FromDisk(on_disk), no_dist=True)
    return sum(isinstance(entry, TensorStorageMetadata) for entry in saved.state_dict_metadata.values())


class _Writer(FileSystemWriter):
    """DCP's writer, changed: each tensor gets a file of its own, and all values that are not tensors share one file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        parts = [replace(plan, items=items, storage_data=None) for items in (values, tensors)]
        in_one, alone = self.prepare_global_plan(parts)  # names the files
        written = super().write_data(in_one, planner)
        self.single_file_per_rank = False
        written.value().extend(super().write_data(alone, planner).value())
        return written


class _FromDisk(DefaultSavePlanner):
    """DCP's planner, changed: a tensor is read from the disk only when it is written. `on_disk`: `id` of the meta tensor that
    stands for a tensor in the plan → the tensor."""

    def __init__(self, on_disk: dict[int, TensorOnDisk]) -> None:
        super().__init__()
        self.on_disk = on_disk

    def resolve_data(self, write_item: WriteItem) -> Any:
        planned = self.lookup_object(write_item.index)
        if isinstance(planned, Tensor) and planned.is_meta:
            return self.on_disk[id(planned)][...]
        return super().resolve_data(write_item)
