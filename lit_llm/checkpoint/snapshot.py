"""Copies of checkpoints in host memory, which can be written to disk while training changes the original."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lit_llm.core._torch import tensors_in

_Kind = tuple[int, bool]  # bytes, pinned


class Snapshots:
    """Copies checkpoints into host memory, and reuses that memory: copying a checkpoint of the same sizes again allocates none.

    A copy needs as much host memory as the checkpoint has bytes; it is pinned for tensors on a CUDA device. Whole storages
    are copied, so tied weights stay tied, and the copy takes as much space on the disk as the original.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[_Kind, UntypedStorage]] = []
        # Used while `take` runs: buffers to reuse, and (device, address, bytes) of a storage → its copy.
        self._free: defaultdict[_Kind, list[UntypedStorage]] = defaultdict(list)
        self._done: dict[tuple[torch.device, int, int], UntypedStorage] = {}

    def take(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a checkpoint in host memory. The copy of the previous call becomes invalid: its memory is reused."""
        for kind, buffer in reversed(self._buffers):
            self._free[kind].append(buffer)
        self._buffers = []
        result: dict[str, Any] = self._copy(checkpoint)
        for device in {device for device, *_ in self._done if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._free, self._done = defaultdict(list), {}  # frees memory that this copy did not use
        return result

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            # A shallow copy first: state_dict() returns an OrderedDict with an attribute (_metadata) that loading needs.
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = self._copy(item)
            return result
        if type(value) in (list, tuple):
            return type(value)(self._copy(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._copy(item) for item in value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        ordinary = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not ordinary or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to("cpu", copy=True)  # storage, sizes and strides do not define such a tensor
        source = tensor.untyped_storage()
        key = (source.device, source.data_ptr(), source.nbytes())
        if key not in self._done:
            on_cuda = source.device.type == "cuda"
            free = self._free[kind := (source.nbytes(), on_cuda)]
            target = free.pop() if free else torch.empty(kind[0], dtype=torch.uint8, pin_memory=on_cuda).untyped_storage()
            self._buffers.append((kind, target))
            self._done[key] = target.copy_(source, non_blocking=on_cuda)
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(self._done[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        return view.requires_grad_(tensor.requires_grad)


def bytes_to_copy(checkpoint: Any) -> int:
    """Bytes of host memory that `Snapshots.take` needs for a checkpoint. Tensors that share a storage count once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(checkpoint)]
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())
