"""Values of tensors that depend on no data, such as positions and masks, kept beside the tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_llm.core._torch import draws_random_numbers, written_arguments

MOST_ELEMENTS = 2**18
"""Of a tensor whose values are kept."""


class Constants:
    """Runs operators again on the values of their inputs, if all of these are known.

    Args:
        value_of: the values of a tensor without data, if they were kept.
    """

    def __init__(self, value_of: Callable[[Tensor], Tensor | None]) -> None:
        self._value_of = value_of
        self._overwritten: set[int] = set()  # addresses of storages that something unknown was written to

    def of(self, tensor: Any) -> Tensor | None:
        """The values of a tensor, or None."""
        value = self._value_of(tensor) if isinstance(tensor, Tensor) else None
        return None if value is None or value.untyped_storage().data_ptr() in self._overwritten else value

    def run(self, operator: Any, args: Sequence[Any], options: dict[str, Any], results: Sequence[Any] = ()) -> Any:
        """What the operator returns for known values; None if some are unknown, or a tensor is large."""
        made = None
        try:
            if not draws_random_numbers(operator):
                known, named = self._real(args), {name: self._real(value) for name, value in options.items()}
                if self._is_small((known, list(named.values()), results)):
                    made = operator(*known, **named | ({"device": "cpu"} if "device" in named else {}))
        except (_Unknown, RuntimeError, IndexError, ValueError):  # the trace itself reports what is wrong
            made = None
        if made is None:
            for tensor in written_arguments(operator, args, options):
                if (value := self._value_of(tensor)) is not None:
                    self._overwritten.add(value.untyped_storage().data_ptr())
        return made

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self.of(value)
            if known is None:
                raise _Unknown
            return known
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(each) for each in value)
        return value

    def _is_small(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(self._is_small(each) for each in value)
        return not isinstance(value, Tensor) or value.numel() <= MOST_ELEMENTS


class _Unknown(Exception):
    """An input has no known values."""


def without_masks(args: Sequence[Any], constants: Constants) -> list[Any] | None:
    """The arguments of `aten.index` with positions instead of known masks; None if a mask is unknown."""
    indices: list[Any] = []
    for index in args[1]:
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
        elif (mask := constants.of(index)) is not None:
            indices += mask.nonzero(as_tuple=True)
        else:
            return None
    return [args[0], indices, *args[2:]]
