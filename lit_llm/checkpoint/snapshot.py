"""Copies of checkpoints in host memory: they can be written while training changes the original."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_Kind = tuple[int, bool]  # bytes, pinned


class Snapshots:
    """Copies checkpoints into reused host memory: a second copy of the same sizes allocates nothing.

    Costs host memory of the size of the checkpoint, pinned if the tensors are on a CUDA device. Whole storages are copied, so
    tied weights stay tied, and a saved copy has the size of the saved original.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[_Kind, UntypedStorage]] = []

    def take(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint. The previous copy becomes invalid: its memory is reused."""
        free: defaultdict[_Kind, list[UntypedStorage]] = defaultdict(list)
        for kind, buffer in reversed(self._buffers):
            free[kind].append(buffer)
        self._buffers = []
        copying = _Copy(free)
        result: dict[str, Any] = copying.any(checkpoint)
        self._buffers = copying.used  # memory that this copy did not use is freed
        for device in copying.cuda_devices:
            torch.cuda.current_stream(device).synchronize()
        return result


def bytes_to_copy(checkpoint: Any) -> int:
    """Host memory that `Snapshots.take` needs for a checkpoint."""
    storages: dict[tuple[torch.device, int], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(checkpoint)
    return sum(storages.values())


class _Copy:
    """One pass over one checkpoint."""

    def __init__(self, free: defaultdict[_Kind, list[UntypedStorage]]) -> None:
        self.free = free
        self.used: list[tuple[_Kind, UntypedStorage]] = []
        self.cuda_devices: set[torch.device] = set()
        self.done: dict[tuple[torch.device, int, int], UntypedStorage] = {}

    def any(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, dict):
            # A shallow copy first: state_dict() returns an OrderedDict with an attribute (_metadata) that loading needs.
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = self.any(item)
            return result
        if type(value) is list:
            return [self.any(item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.any(item) for item in value))
        if type(value) is tuple:
            return tuple(self.any(item) for item in value)
        return copy.deepcopy(value)

    def tensor(self, tensor: Tensor) -> Tensor:
        ordinary = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not ordinary or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to("cpu", copy=True)  # not defined by storage, sizes and strides alone
        storage = self.storage(tensor.untyped_storage())
        view = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return view.requires_grad_(tensor.requires_grad)

    def storage(self, source: UntypedStorage) -> UntypedStorage:
        key = (source.device, source.data_ptr(), source.nbytes())
        if key not in self.done:
            on_cuda = source.device.type == "cuda"
            kind = (source.nbytes(), on_cuda)
            if self.free[kind]:
                target = self.free[kind].pop()
            else:
                target = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=on_cuda).untyped_storage()
            self.used.append((kind, target))
            self.done[key] = target
            target.copy_(source, non_blocking=on_cuda)
            if on_cuda:
                self.cuda_devices.add(source.device)
        return self.done[key]
