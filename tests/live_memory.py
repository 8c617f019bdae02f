"""Counts the memory that live tensors take, and of what it consists at the peak. Works with and without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lit_llm.core._torch import DispatchMode, tensors_in
from lit_llm.core.dtensor import local_part

OTHERS = "activations and work"
GATHERED = "gathered weights"


class _Life:
    """The time that a storage keeps its size. Times are numbers of events."""

    __slots__ = ("born", "died", "kind", "size")

    def __init__(self, size: int, born: int, kind: str) -> None:
        self.size, self.born, self.kind = size, born, kind
        self.died: int | None = None


class LiveMemory(DispatchMode):
    """While it is active, every storage that an operation allocates is counted until it is freed.

    FSDP2 empties the storages of gathered weights and fills them again: such storages are of the kind GATHERED. Temporary
    memory inside a kernel is not seen. Tensors that existed before are counted once they are `named`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._time = 0
        self._lives: list[_Life] = []
        self._now: dict[int, _Life] = {}  # by the address of the live storage
        self._watched: dict[int, Any] = {}  # weak references
        self._peak = (0, 0)  # bytes, time

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            if id(storage) in self._watched:
                if (life := self._now.get(id(storage))) is not None:
                    life.kind = GATHERED
                self._end(id(storage))
                self._begin(id(storage), size, GATHERED)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each is not Tensor and not issubclass(each, FakeTensor | nn.Parameter) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._watch(tensor)
        return result

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what the storages of these tensors are, from their allocation on."""
        for tensor in tensors:
            part = local_part(tensor)
            self._watch(part)
            life = self._now.get(id(part.untyped_storage()))
            if life is not None:
                life.kind = kind

    def restart(self) -> None:
        """Forget the peak so far."""
        self._lives = list(self._now.values())
        self._peak = (self.total, self._time)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind when most memory was in use since `restart`."""
        _, time = self._peak
        found: dict[str, int] = {}
        for life in self._lives:
            if life.born <= time and (life.died is None or life.died > time):
                found[life.kind] = found.get(life.kind, 0) + life.size
        return found

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._watched and tensor.device.type != "meta":
            self._watched[key] = weakref.ref(storage, partial(self._freed, key))
            self._begin(key, storage.nbytes(), OTHERS)

    def _freed(self, key: int, _: Any) -> None:
        del self._watched[key]
        self._end(key)

    def _begin(self, key: int, size: int, kind: str) -> None:
        if size:
            self._time += 1
            self._now[key] = life = _Life(size, self._time, kind)
            self._lives.append(life)
            self.total += size
            if self.total > self._peak[0]:
                self._peak = (self.total, self._time)

    def _end(self, key: int) -> None:
        life = self._now.pop(key, None)
        if life is not None:
            self._time += 1
            life.died = self._time
            self.total -= life.size
