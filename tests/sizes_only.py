"""Runs training code on tensors that have sizes and no data, except integers: token ids, document numbers and counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lit_llm.core._torch import LOCAL_SCALAR, DispatchMode, tensors_in


@contextmanager
def without_data() -> Iterator[None]:
    """Inside, tensors on the CPU have no data. Tensors on the meta device stay there.

    New integers have data, and so has what is computed from tensors with data. So the code can count targets, number
    documents and ask a process group for decisions. A number read from a tensor without data is 1, a bool False.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Integers():
        yield


class _Integers(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        if any(type(x) not in (Tensor, nn.Parameter) and not isinstance(x, FakeTensor) for x in inputs):
            return NotImplemented  # a distributed tensor: its operations on local tensors come here again
        if any(isinstance(x, FakeTensor) for x in inputs):
            if func is LOCAL_SCALAR.default:
                return 1.0 if args[0].is_floating_point() else 0
            return func(*args, **kwargs)
        target = kwargs.get("device")
        if inputs:
            keeps = target is None or torch.device(target).type == inputs[0].device.type
        else:
            is_meta = target is not None and torch.device(target).type == "meta"
            keeps = is_meta or not _makes_floats(func, kwargs.get("dtype"))
        if not keeps:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


_MAKE_INTEGERS = (torch.ops.aten.arange, torch.ops.aten.randint, torch.ops.aten.randperm)
"""Unless they are given another dtype."""


def _makes_floats(func: Any, dtype: torch.dtype | None) -> bool:
    if dtype is None:
        return func.overloadpacket not in _MAKE_INTEGERS
    return dtype.is_floating_point or dtype.is_complex
