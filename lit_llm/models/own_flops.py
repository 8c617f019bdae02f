"""Counts a user's module's training FLOPs per token, by torch's FlopCounterMode on tensors without data."""

from __future__ import annotations

import json
import math
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lit_llm.core._torch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    CPU_LSTM,
    CPU_LSTM_BACKWARD,
    DispatchMode,
    FakeTensorMode,
)
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossSums


def _lstm_flop(x: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * (math.prod(input_weight) + math.prod(hidden_weight))


FLOPS: dict[Any, Any] = {  # operators that torch's counter does not know → FLOPs as functions of shapes
    CPU_ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    CPU_ATTENTION_BACKWARD: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
    torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
    CPU_LSTM: _lstm_flop,
    CPU_LSTM_BACKWARD: lambda *args, **__: 2 * _lstm_flop(*args),
}
_ROWS = 2
_MOST_OPERATIONS = 500
"""A module that loops over positions, with more operations than this in a forward pass, is counted on short sequences."""


def own_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> tuple[float, float]:
    """Return the training FLOPs per token in sequences of `length` tokens: (FLOPs of matrix products, FLOPs of attention).

    The tensors have no data here. If the module's operations depend on data, the result is (6 · number of parameters, 0).
    """
    return _of_written(architecture.class_path, json.dumps(architecture.init_args), vocab_size, length)


@lru_cache(maxsize=64)
def _of_written(class_path: str, init_args: str, vocab_size: int, length: int) -> tuple[float, float]:
    architecture, fake = Architecture(class_path, json.loads(init_args)), FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
        try:
            with fake:
                module = CustomModel(GPTConfig(vocab_size=vocab_size), architecture)
        except Exception:  # in the user's code: its constructor reads values
            module = CustomModel(GPTConfig(vocab_size=vocab_size), architecture)
        try:
            with fake:
                return tuple(_at_length(module, length).tolist())
        except Exception:  # in the user's code or in torch: the operations depend on values
            return 6.0 * module.num_parameters(), 0.0


def _at_length(module: CustomModel, length: int) -> np.ndarray:
    """Return (FLOPs of matrix products, FLOPs of attention) per token in sequences of `length` tokens, as `_counted` does.

    If the module seems to loop over positions, counting would take long. Then fit a + b·T + c/T to the FLOPs at short lengths
    T = u, 2u and 3u, test the fit at 4u (ValueError if it is wrong), and return its values at `length`.
    """
    unit = max(1, min(4, length // 16))
    few, more = _operations(module, unit), _operations(module, 2 * unit)
    if few is None or more is None or length // unit * (more - few) <= _MOST_OPERATIONS:
        return _counted(module, length)
    lengths = unit * np.array([1.0, 2.0, 3.0, 4.0, length / unit])
    terms, known = np.stack([lengths**0, lengths, 1 / lengths], axis=1), [_counted(module, i * unit) for i in (1, 2, 3, 4)]
    *_, tested, wanted = terms @ np.linalg.solve(terms[:3], np.array(known[:3]))
    if not np.allclose(tested, known[3], rtol=0.01):
        raise ValueError("the figures of short sequences do not show those of long ones")
    return wanted


def _counted(module: CustomModel, length: int) -> np.ndarray:
    """Count the FLOPs per token of forward and backward at `length`: (FLOPs of matrix products, FLOPs of attention)."""
    ids = torch.zeros(_ROWS, length, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
        sums = module(ids, ids)
        assert isinstance(sums, LossSums)
        sums.loss.backward()
    totals = np.zeros(2)
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        totals[int("attention" in operator.__name__)] += flops
    return totals / (_ROWS * length)


def _operations(module: CustomModel, length: int) -> int | None:
    """Number of torch operations in a forward pass of `length` positions. None: the module fails with so few positions."""
    with torch.no_grad(), _Operations() as counter:
        try:
            module(torch.zeros(_ROWS, length, dtype=torch.int64))
        except Exception:  # in the user's code
            return None
    return counter.count


class _Operations(DispatchMode):
    """Context manager. Its attribute `count` is the number of torch operations that ran inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))
