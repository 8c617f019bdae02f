"""Record the bytes that operations allocate and free, on tensors that have sizes and no data.

The device of a `Sized` tensor is the CPU, so that autograd, autocast and the choice of kernels work as on a CPU. Each operation
runs on the meta device, which computes shapes only. Weak references report when a storage is freed: when neither a variable of
the program nor autograd refers to the storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lit_llm.core._torch import (
    CAST,
    COLLECTIVES,
    CPU_LSTM,
    CPU_LSTM_BACKWARD,
    LOCAL_SCALAR,
    LOG_SOFTMAX,
    DispatchMode,
    draws_random_numbers,
    make_wrapper,
    no_torch_function,
    tensors_in,
    written_arguments,
)
from lit_llm.models.attention_blocks import backward_in_blocks, forward_in_blocks
from lit_llm.models.own_flops import FLOPS
from lit_llm.plan.segments import ACTIVATIONS, ATTENTION, KERNELS, MATMUL, TRAFFIC, WEIGHT_COPIES, Change, Event

aten = torch.ops.aten


def _lstm_workspace(args: list[Any]) -> Tensor:
    """Return a tensor as large as the buffer that oneDNN's LSTM layer saves for backward. torch's meta kernel has no buffer.

    The buffer has the gates twice, the states of layer and iteration, the cells and the biases, in padded rows and whole pages,
    as torch 2.13 allocates them on x86.
    """
    x, width, train = args[0], args[10], args[15]
    size, steps, batch = x.element_size(), x.size(0), x.size(1)
    states = 2 * (steps + 1) * batch * _padded(max(width, x.size(2)), size)
    rows = steps * batch
    parts = (rows * _padded(4 * width, size), rows * 4 * width, states, states, states, rows * _padded(width, size), 4 * width)
    total = sum(-(-part * size // 4096) * 4096 for part in parts) if train else 0
    return torch.empty(total, dtype=torch.uint8, device="meta")


def _lstm_work(x: Tensor, weights: list[Tensor]) -> int:
    """Return the temporary bytes of oneDNN's LSTM layer with input `x`: packed weights, and the gates once."""
    gates, size = weights[0].size(0), x.element_size()
    return size * (sum(w.size(1) for w in weights) * _padded(gates, size) + x.size(0) * x.size(1) * gates + gates)


def _padded(n: int, size: int) -> int:
    """Return the number of elements to which oneDNN pads a row of n elements of `size` bytes: whole cache lines, and one more
    line where rows would share the same cache sets."""
    n = -(-n * size // 64) * 64 // size
    return n + 64 // size if n % 256 == 0 else n


_COLLECTIVES = {  # a reduce-scatter sends as much as an all-gather
    COLLECTIVES.all_gather_into_tensor: "all_gather",
    COLLECTIVES.reduce_scatter_tensor: "all_gather",
    COLLECTIVES.all_reduce: "all_reduce",
    COLLECTIVES.all_to_all_single: "all_to_all",
}
_ELEMENTWISE = {aten.add, aten.add_, aten.sub, aten.mul, aten.mul_, aten.div}
"""Operators whose kernel on a CPU first copies inputs of a narrower dtype."""


class Sized(Tensor):
    """Tensor without data. `meta`: a meta tensor with the same sizes. `value`: a tensor with the values, None if unknown."""

    meta: Tensor
    value: Tensor | None = None

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


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of `value` (a tensor, or nested lists and tuples) with `change` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(mapped(each, change) for each in value) if isinstance(value, (list, tuple)) else value


def sized(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Sized:
    """Return a tensor without data of the given shape. No Recorder counts its allocation."""
    return Sized(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


class Undetermined(Exception):
    """Raised if a module cannot be traced. The message completes "cannot be traced, because"."""


MOST_ELEMENTS = 2**18
"""The most elements of a tensor whose values a Recorder keeps."""


class Recorder(DispatchMode):
    """Context manager that records allocations, releases, FLOPs and collectives as events (`segments.Event`).

    Attributes:
        segments: a list of events for each segment of the program. `begin` starts the next segment, and may set `kind`.
        kind: kind of the events of storages that are allocated from now on.
        weights: ids of the storages of weights. Casts of these weights get events of the kind WEIGHT_COPIES.
        operators: names of the operators that have run. Empty if `most` is None.

    Args:
        cuda: whether to count the temporary memory inside of a GPU's kernels instead of a CPU's kernels.
        most: number of operations that a user's module may take. None: the code is lit_llm's own, whose sizes never depend on
            values of tensors.

    Raises:
        Undetermined: `most` is set, and an operation depends on values, has no rule for sizes, or exceeds `most`.
    """

    def __init__(self, *, cuda: bool, most: int | None = None) -> None:
        super().__init__()
        self.cuda = cuda
        self.most = most
        self.operators: set[str] = set()
        self._overwritten: set[int] = set()  # addresses of storages with unknown values
        self.operations = 0
        self.segments: list[list[Event]] = [[]]
        self.kind = ACTIVATIONS
        self.weights: set[int] = set()
        self._counts = True
        self._watched: dict[int, Any] = {}  # address of a storage -> a weak reference, or the storage if it is not counted

    def begin(self, kind: int | None = None) -> None:
        self.segments.append([])
        self.kind = self.kind if kind is None else kind

    def copied(self) -> list[list[Event]]:
        """Return a copy of `segments`. Later events are not added to the copy."""
        return [[*segment] for segment in self.segments]

    def add(self, kind: int, amount: int) -> None:
        self.segments[-1].append((kind, amount))

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Keep the storages of `tensors` alive, and record neither their allocation nor their release from now on."""
        for tensor in tensors:
            storage = tensor.meta.untyped_storage()  # type: ignore[attr-defined]
            self._watched[id(storage)] = storage

    def receive(self, shape: Sequence[int], dtype: torch.dtype, kind: int | None) -> Tensor:
        """Return a new tensor whose allocation another trace counts. Its release is recorded as `kind`; None: not recorded."""
        before, self._counts = self._counts, False
        tensor: Sized = torch.empty(shape, dtype=dtype, device="cpu")  # type: ignore[assignment]
        self._counts = before
        if kind is not None:
            self._watch(tensor.meta.untyped_storage(), kind)
        return tensor

    def hand_over(self, tensor: Tensor) -> None:
        """From now on, do not record the release of `tensor`, because another trace records it."""
        self._watch(tensor.meta.untyped_storage(), None)  # type: ignore[attr-defined]

    def _watch(self, storage: Any, kind: int | None) -> None:
        key = id(storage)
        self._watched[key] = weakref.ref(storage, partial(self._freed, key, kind, storage.nbytes()))

    def _freed(self, key: int, kind: int | None, size: int, _: Any) -> None:
        del self._watched[key]
        if kind is not None:
            self.add(kind, -size)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = operator.overloadpacket
        if self.most is not None:
            self.operators.add(packet.__name__)
            self.operations += 1
            if self.operations > self.most:
                raise Undetermined(f"it takes more than {self.most:,} operations")
        if packet in (LOCAL_SCALAR, aten.item):
            if self.most is None:
                return 0  # a seed, which may be any number
            if (value := self._known(*args)) is None:
                raise Undetermined("it reads a value of a tensor (Tensor.item; bool, int or float of a tensor)")
            return value.item()
        if packet is aten.index and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            if self.most is None:
                return Sized(args[0].meta.new_empty(0))  # lit_llm selects only ids out of range: none here
            raise Undetermined("it selects elements by a mask, so sizes depend on the data")
        inputs: dict[int, Sized] = {}

        def unwrap(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Sized):
                inputs[id(tensor.meta)] = tensor
            return tensor.meta if isinstance(tensor, Sized) else tensor.to("meta")

        on_meta = [mapped(a, unwrap) for a in args]
        options = {key: mapped(value, unwrap) for key, value in (kwargs or {}).items()}
        if not inputs and any(isinstance(a, Tensor) for a in args):
            return operator(*args, **(kwargs or {}))  # on tensors with data
        if "device" in options:
            options["device"] = "meta"
        options.pop("generator", None)
        key = (self.cuda, operator, *(_spec(a) for a in on_meta), *((name, _spec(a)) for name, a in options.items()))
        known = _RESULTS.get(key)
        if known is None:
            try:
                result = operator(*on_meta, **options)
            except NotImplementedError:
                raise Undetermined(f"the sizes of what {packet} returns are not known without data") from None
            if packet is CPU_LSTM:
                result = (*result[:3], _lstm_workspace(on_meta))
            known = _Result.of(result, packet, on_meta, options, inputs, cuda=self.cuda)
            _RESULTS[key] = known
        else:
            result = known.again() if known.tensors else operator(*on_meta, **options)
        if known.flops:
            self.add(ATTENTION if "attention" in packet.__name__ else MATMUL, known.flops)
        if packet in _COLLECTIVES:  # the group's name is the last argument
            kind = KERNELS + 1 + 2 * TRAFFIC.index((args[-1], _COLLECTIVES[packet]))
            self.add(kind, max(on_meta[0].nbytes, result.nbytes))
            self.add(kind + 1, 1)
        kind = self.kind
        if packet is CAST and id(args[0].meta.untyped_storage()) in self.weights:
            kind = WEIGHT_COPIES
        if known.work:
            self.add(kind, known.work)
        wrapped = mapped(result, lambda tensor: self._wrapped(tensor, inputs, kind))
        if known.work:
            self.add(kind, -known.work)
        if self.most is not None:
            values = self._run_again(operator, args, kwargs or {}, wrapped)
            for one, value in zip(tensors_in(wrapped), tensors_in(values), strict=values is not None):
                one.value = value  # type: ignore[attr-defined]
        return wrapped

    def _known(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values if they are known, because they depend on no data (positions and masks); else None."""
        value = tensor.value if isinstance(tensor, Sized) else tensor
        return None if value is None or value.untyped_storage().data_ptr() in self._overwritten else value

    def _run_again(self, operator: Any, args: Sequence[Any], options: dict[str, Any], results: Any) -> Any:
        """Return the operator's results, computed from known values. If a value is unknown or a tensor has more than
        MOST_ELEMENTS elements, return None, and mark the values of tensors that the operator overwrites as unknown."""
        inputs = [*tensors_in((args, options))]
        is_known = not draws_random_numbers(operator) and all(self._known(tensor) is not None for tensor in inputs)
        again = None
        if is_known and all(tensor.numel() <= MOST_ELEMENTS for tensor in (*inputs, *tensors_in(results))):
            known, named = mapped(list(args), self._known), {key: mapped(x, self._known) for key, x in options.items()}
            with suppress(RuntimeError, IndexError, ValueError):  # the trace itself reports the error
                again = operator(*known, **named | ({"device": "cpu"} if "device" in options else {}))
        if again is None:
            values = map(self._known, tensors_in(written_arguments(operator, args, options)))
            self._overwritten |= {value.untyped_storage().data_ptr() for value in values if value is not None}
        return again

    def _wrapped(self, tensor: Tensor, inputs: dict[int, Sized], kind: int) -> Sized:
        if id(tensor) in inputs:
            return inputs[id(tensor)]
        storage = tensor.untyped_storage()
        if self._counts and id(storage) not in self._watched:
            self._watch(storage, kind)
            self.add(kind, storage.nbytes())
        return Sized(tensor)


@dataclass(frozen=True)
class _Result:
    """Record of the result of an operator on inputs of given sizes, kept so that the operator need not run again.

    Attributes:
        tensors: (size, strides, dtype) of each result. Empty if a result is not a new tensor, such as a view.
        is_list: whether the operator returns a tuple or list.
        flops: FLOPs by torch's formulas and the formulas in `own_flops.FLOPS`.
        work: temporary bytes inside of the kernel, which the trace cannot see (`_work_bytes`).
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
        results = tuple(torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in self.tensors)
        return results if self.is_list else results[0]


_RESULTS: dict[Any, _Result] = {}


def _work_bytes(packet: Any, args: list[Any], inputs: list[Tensor], result: Any, *, cuda: bool) -> int:
    """Return the temporary bytes inside of the kernel of operator `packet`, by torch 2.13's source and its allocator's log."""
    if packet is LOG_SOFTMAX and not inputs[0].is_contiguous():
        return inputs[0].numel() * inputs[0].element_size()
    # A GPU computes attention in blocks only if weights are dropped. Without dropout, the operator stands for FlexAttention.
    if packet is torch.ops.lit_llm.attention and not (cuda and args[5] is None):
        return _work_inside(forward_in_blocks, args)
    if packet is torch.ops.lit_llm.attention_backward and not (cuda and args[8] is None):
        return _work_inside(backward_in_blocks, args)
    if cuda:
        return 0
    if packet in (CPU_LSTM, CPU_LSTM_BACKWARD):
        return _lstm_work(args[0], args[1:3])
    if packet in _ELEMENTWISE and len(inputs) == 2 and inputs[0].dtype != inputs[1].dtype:
        wide = result.element_size()
        return sum(x.numel() * wide for x in inputs if x.element_size() < wide and x.ndim)
    return 0


def _work_inside(body: Callable[..., Any], args: list[Any]) -> int:
    """Return the temporary bytes of an operator whose kernel is the Python function `body`, traced with inputs like `args`."""
    inner = Recorder(cuda=False)
    inputs = [_like(a) if isinstance(a, Tensor) else a for a in args]
    inner.exclude(a for a in inputs if isinstance(a, Sized))
    with inner:
        results = body(*inputs)
    change = Change.of(inner.segments[0], lambda gradient: (0, 0))
    del results
    return sum(change.peak) - sum(change.end)


def _like(meta: Tensor) -> Tensor:
    """Return a tensor of the shape of `meta`: a `Sized` one without values, but for 2-D integers zeros. As document numbers,
    zeros mean one document, the case that takes the most memory."""
    if meta.ndim == 2 and not meta.is_floating_point():
        return torch.zeros(meta.shape, dtype=meta.dtype)
    return Sized(torch.empty_like(meta))


def _spec(value: Any) -> Any:
    """Return a hashable stand-in for an operator's argument: (shape, strides, dtype) of a tensor, (type, value) otherwise."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_spec(each) for each in value)
    return type(value), value
