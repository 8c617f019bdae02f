"""Records what operations allocate and free, on tensors that have sizes and no data.

A `Sized` tensor says that it is on the CPU, so that autograd, autocast and the choice of kernels are those of the CPU. Each
operation runs on the meta device, which computes shapes only. Storages are watched by weak references: a storage is freed when
neither a variable of the program nor autograd holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lit_llm._torch import (
    CAST,
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    LOCAL_SCALAR,
    LOG_SOFTMAX,
    DispatchMode,
    make_wrapper,
    no_torch_function,
)
from lit_llm.models.attention_blocks import backward_in_blocks, forward_in_blocks

ACTIVATIONS, LOSS_HEAD, GRADIENTS, WEIGHT_COPIES, MATMUL, ATTENTION = range(6)
"""Kinds of events: bytes of memory, and FLOPs. GRADIENTS are those that a parameter receives."""

Event = tuple[int, int]
"""(kind, amount). Allocations are positive, releases negative."""

aten = torch.ops.aten

FLOPS: dict[Any, Any] = {  # of operators that torch's counter does not know; functions of shapes, like its own
    CPU_ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    CPU_ATTENTION_BACKWARD: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
    aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
}
_OF_VALUES: dict[Any, Callable[..., Any]] = {  # what depends on values: a seed is any number
    LOCAL_SCALAR: lambda x: 0,
    aten.item: lambda x: 0,
}
_ELEMENTWISE = {aten.add, aten.add_, aten.sub, aten.mul, aten.mul_, aten.div}
"""Operators whose kernel on a CPU first copies inputs of a narrower dtype."""


class Sized(Tensor):
    """A tensor without data: `meta` has its sizes."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, requires_grad: bool = False) -> Sized:
        sized = make_wrapper(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
            requires_grad=requires_grad,
        )
        sized.meta = meta
        return sized

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{operator} outside a Recorder")


def sized(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Sized:
    """A tensor without data, made outside of a Recorder."""
    return Sized(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad)


class Recorder(DispatchMode):
    """While it is active, each allocation, release and FLOP becomes an event of the current segment.

    Attributes:
        segments: a list of events for each part of the program; `begin` starts the next one.
        kind: of storages that are allocated from now on.
        copies_weights: casts of these storages are copies of weights.
    """

    def __init__(self, *, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda
        self.segments: list[list[Event]] = [[]]
        self.kind = ACTIVATIONS
        self.weights: set[int] = set()
        self._counts = True
        self._watched: dict[int, Any] = {}  # address of a storage -> a weak reference, or the storage if it is not counted

    def begin(self) -> None:
        self.segments.append([])

    def add(self, kind: int, amount: int) -> None:
        self.segments[-1].append((kind, amount))

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Neither the allocation nor the release of these tensors is an event."""
        for tensor in tensors:
            storage = tensor.meta.untyped_storage()  # type: ignore[attr-defined]
            self._watched[id(storage)] = storage

    def receive(self, shape: Sequence[int], dtype: torch.dtype, kind: int | None) -> Tensor:
        """A tensor that another trace has allocated; count its release as `kind`. None: do not."""
        before, self._counts = self._counts, False
        tensor: Sized = torch.empty(*shape, dtype=dtype, device="cpu")  # type: ignore[assignment]
        self._counts = before
        if kind is not None:
            self._watch(tensor.meta.untyped_storage(), kind)
        return tensor

    def hand_over(self, tensor: Tensor) -> None:
        """Leave the release of this tensor to another trace."""
        storage = tensor.meta.untyped_storage()  # type: ignore[attr-defined]
        self._watched[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage)))

    def _watch(self, storage: Any, kind: int) -> None:
        key = id(storage)
        self._watched[key] = weakref.ref(storage, partial(self._freed, key, kind, storage.nbytes()))

    def _freed(self, key: int, kind: int, size: int, _: Any) -> None:
        del self._watched[key]
        self.add(kind, -size)

    def _forget(self, key: int, _: Any) -> None:
        del self._watched[key]

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = operator.overloadpacket
        if packet in _OF_VALUES:
            return _OF_VALUES[packet](*args)
        if packet is aten.index and args[1][0].dtype == torch.bool:
            return Sized(args[0].meta.new_empty(0))  # ids out of range, of which there are none
        inputs: dict[int, Sized] = {}
        on_meta = [_unwrapped(a, inputs) for a in args]
        options = {key: _unwrapped(value, inputs) for key, value in (kwargs or {}).items()}
        if not inputs and any(isinstance(a, Tensor) for a in args):
            return operator(*args, **(kwargs or {}))  # on tensors with data
        if "device" in options:
            options["device"] = "meta"
        options.pop("generator", None)
        key = (self.cuda, operator, *(_spec(a) for a in on_meta), *((name, _spec(a)) for name, a in options.items()))
        known = _RESULTS.get(key)
        if known is None:
            result = operator(*on_meta, **options)
            known = _Result.of(result, packet, on_meta, options, inputs, cuda=self.cuda)
            _RESULTS[key] = known
        else:
            result = known.again() if known.tensors else operator(*on_meta, **options)
        if known.flops:
            self.add(ATTENTION if "attention" in packet.__name__ else MATMUL, known.flops)
        kind = self.kind
        if packet is CAST and id(args[0].meta.untyped_storage()) in self.weights:
            kind = WEIGHT_COPIES
        if known.work:
            self.add(kind, known.work)
        wrapped = self._wrapped(result, inputs, kind)
        if known.work:
            self.add(kind, -known.work)
        return wrapped

    def _wrapped(self, result: Any, inputs: dict[int, Sized], kind: int) -> Any:
        if isinstance(result, Tensor):
            if id(result) in inputs:
                return inputs[id(result)]
            storage = result.untyped_storage()
            if self._counts and id(storage) not in self._watched:
                self._watch(storage, kind)
                self.add(kind, storage.nbytes())
            return Sized(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrapped(each, inputs, kind) for each in result)
        return result


@dataclass(frozen=True)
class _Result:
    """What an operator does to inputs of given sizes, so that it need not run on the meta device again.

    Attributes:
        tensors: size, strides and type of each result, if all results are new tensors.
        is_list: the operator returns a tuple or list.
        flops: by torch's formulas and FLOPS.
        work: temporary bytes inside of the kernel, which the trace cannot see.
    """

    tensors: tuple[Any, ...]
    is_list: bool
    flops: int
    work: int

    @classmethod
    def of(
        cls, result: Any, packet: Any, args: list[Any], options: dict[str, Any], inputs: dict[int, Sized], *, cuda: bool
    ) -> _Result:
        results = result if isinstance(result, (list, tuple)) else (result,)
        storages = {id(x.meta.untyped_storage()) for x in inputs.values()}
        fresh = all(isinstance(x, Tensor) and id(x.untyped_storage()) not in storages for x in results)
        fresh = fresh and len({id(x.untyped_storage()) for x in results}) == len(results)
        specs = tuple((tuple(x.shape), x.stride(), x.dtype) for x in results) if fresh else ()
        flops = 0
        if packet in FLOPS:
            flops = FLOPS[packet](*(a.shape if isinstance(a, Tensor) else a for a in args), **options)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **options, out_val=result)
        work = _work_bytes(packet, args, [x.meta for x in inputs.values()], results[0], cuda=cuda)
        return cls(specs, isinstance(result, (list, tuple)), int(flops), work)

    def again(self) -> Any:
        made = tuple(torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in self.tensors)
        return made if self.is_list else made[0]


_RESULTS: dict[Any, _Result] = {}


def _work_bytes(packet: Any, args: list[Any], inputs: list[Tensor], result: Any, *, cuda: bool) -> int:
    """Temporary memory inside of a kernel: as in torch 2.13's source and the allocator's log."""
    if packet is LOG_SOFTMAX and not inputs[0].is_contiguous():
        return inputs[0].numel() * inputs[0].element_size()
    # A GPU computes attention in blocks only if weights are dropped. Otherwise the operator stands for FlexAttention.
    if packet is torch.ops.lit_llm.attention and not (cuda and args[5] is None):
        return _work_inside(forward_in_blocks, args)
    if packet is torch.ops.lit_llm.attention_backward and not (cuda and args[8] is None):
        return _work_inside(backward_in_blocks, args)
    if cuda:
        return 0
    if packet in _ELEMENTWISE and len(inputs) == 2 and inputs[0].dtype != inputs[1].dtype:
        wide = result.element_size()
        return sum(x.numel() * wide for x in inputs if x.element_size() < wide and x.ndim)
    return 0


def _work_inside(body: Callable[..., Any], args: list[Any]) -> int:
    """Temporary bytes of an operator that is written in Python: traced with inputs of these sizes."""
    inner = Recorder(cuda=False)
    inputs = [_like(a) if isinstance(a, Tensor) else a for a in args]
    inner.exclude(a for a in inputs if isinstance(a, Sized))
    with inner:
        results = body(*inputs)
    live = most = 0
    for kind, amount in inner.segments[0]:
        if kind == ACTIVATIONS:
            live += amount
            most = max(most, live)
    del results
    return most - live


def _like(meta: Tensor) -> Tensor:
    """A tensor of these sizes. Zeros as document numbers: one document, which takes the most memory."""
    if meta.ndim == 2 and meta.dtype == torch.int64:
        return torch.zeros(meta.shape, dtype=meta.dtype)
    return Sized(torch.empty_like(meta))


def _spec(value: Any) -> Any:
    """A value as a part of a key: of a tensor its sizes and type."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_spec(each) for each in value)
    return type(value), value


def _unwrapped(value: Any, inputs: dict[int, Sized]) -> Any:
    if isinstance(value, Sized):
        inputs[id(value.meta)] = value
        return value.meta
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(each, inputs) for each in value)
    return value
