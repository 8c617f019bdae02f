"""Make a trace on a CPU allocate and keep the tensors that GPU kernels and compiled blocks would allocate and keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from lit_llm.core._torch import FLASH_ATTENTION, DispatchMode, tensors_in
from lit_llm.distributed.activation_checkpointing import keep_expensive
from lit_llm.plan.recorder import Recorder, Sized

# -- kernels of a GPU -------------------------------------------------------------------------------------------------


class CudaKernels(TorchFunctionMode):
    """Context manager that replaces functions of torch by functions that allocate and save the same tensors as GPU kernels.

    A CPU build of torch cannot run autograd on tensors whose device is a GPU. So the trace runs the CPU's kernels, except for
    these functions, whose replacements follow torch 2.13's source:

    - rms_norm, layer_norm: one kernel that saves its input and the statistics of each row (`_fused_rms_norm`,
      `native_layer_norm`). Under autocast, norms, pow and square run in fp32 (AT_FORALL_FP32 in `ATen/autocast_mode.h`).
    - attention without dropout: FlashAttention's operator, which saves logsumexp. The output has the layout of the queries.

    float8 needs no replacement: torchao saves inputs and weights for the backward pass in bf16, as without float8
    (`matmul_with_hp_or_float8_args` in `torchao/float8/float8_linear.py`).
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(_REPLACED[function], function) if function in _REPLACED else function
        return run(*args, **(kwargs or {}))

    @staticmethod
    def around(module: nn.Module) -> None:
        """Make the module's `forward` enter this mode by itself: a backward pass that recomputes runs outside of the mode."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with CudaKernels():
                return forward(*args, **kwargs)

        module.forward = run


def _fp32(x: Tensor) -> Tensor:
    return x.float() if torch.is_autocast_enabled("cpu") and x.is_floating_point() else x


_REPLACED: dict[Any, Any] = {  # torch's function -> its replacement, called with torch's function first
    F.rms_norm: lambda _, x, shape, weight=None, eps=None: _Norm.apply(_fp32(x), weight, None, len(shape), 1),
    F.layer_norm: lambda _, x, shape, weight=None, bias=None, eps=1e-5: _Norm.apply(_fp32(x), weight, bias, len(shape), 2),
    F.scaled_dot_product_attention: lambda _, q, k, v, **options: FLASH_ATTENTION(q, k, v)[0],
    **dict.fromkeys((torch.square, Tensor.square, torch.pow, Tensor.pow), lambda function, x, *args: function(_fp32(x), *args)),
}


class _Norm(Function):
    """Autograd function in place of a norm, for tensors without data: saves its input and `statistics` fp32 numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, ndim: int, statistics: int) -> Tensor:
        y = torch.empty_like(x)
        rows = torch.empty(statistics, *x.shape[:-ndim], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, bias, rows)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None


# -- kernels of compiled blocks ---------------------------------------------------------------------------------------


def keep_as_compiled(block: nn.Module, recorder: Recorder, *, inputs: bool) -> None:
    """Change a block in place so that its trace saves the tensors that the compiled block saves for the backward pass.

    The rules are from torch's min-cut partitioner (torch/_functorch/partitioners.py). A matrix product or attention is
    never computed twice, so its result is saved if the backward pass needs the result. If `inputs`, the inputs of matrix
    products and attention are saved too, because kernels read them from memory for the gradients of weights. If not `inputs`
    (activation checkpointing cheap), the inputs are recomputed. Elementwise operators, casts and norms are recomputed from the
    saved tensors, within the kernels of the backward pass. The partitioner saves the statistics of norms; this trace does not.
    tests/plan/test_compiled_blocks.py compares partitioner and trace.
    """
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        kept = _Kept(recorder, inputs=inputs)
        with saved_tensors_hooks(kept.pack, kept.unpack), kept:
            result = forward(*args, **kwargs)
        kept.settle()
        return result

    block.forward = run


class _Saved:
    """Record of a tensor that autograd saves. If the backward pass recomputes the tensor, `tensor` is None, and `origins` are
    the tensors from which it is recomputed."""

    def __init__(self, tensor: Sized) -> None:
        self.tensor: Sized | None = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.origins: list[Tensor] = []


class _Kept(DispatchMode):
    """Context manager of a block's forward pass. It notes for the result of each operator from which tensors the result can be
    recomputed, and then drops the tensors that autograd has saved although they can be recomputed (`settle`).

    Attributes:
        origins: {id of a result's storage: the tensors on the meta device from which the result is computed}: results of matrix
            products and attention, and inputs of the block.
        in_memory: ids of storages that matrix products and attention write, and, if `inputs`, read.
    """

    def __init__(self, recorder: Recorder, *, inputs: bool) -> None:
        super().__init__()
        self.recorder, self.inputs = recorder, inputs
        self.origins: dict[int, list[Tensor]] = {}
        self.in_memory: set[int] = set()
        self.saved: list[_Saved] = []

    def pack(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, Sized):
            return tensor
        self.saved.append(_Saved(tensor.detach()))  # type: ignore[arg-type]
        return self.saved[-1]

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.tensor is not None:
            return saved.tensor
        again = self.recorder.receive(saved.shape, saved.dtype, None)
        self.recorder.exclude((again,))  # the recomputed tensor exists only within a kernel
        return again

    def settle(self) -> None:
        """Drop the saved tensors that the backward pass recomputes. For each, keep the tensors from which it is recomputed."""
        for saved in self.saved:
            assert saved.tensor is not None
            key = _storage(saved.tensor)
            if key in self.origins and key not in self.in_memory:
                saved.tensor, saved.origins = None, self.origins[key]
        self.saved, self.origins = [], {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        inputs = [x for x in tensors_in(args) if isinstance(x, Sized)]
        outputs = [x for x in tensors_in(result) if isinstance(x, Sized) and _storage(x) not in {_storage(y) for y in inputs}]
        expensive = keep_expensive(None, operator) is CheckpointPolicy.MUST_SAVE
        from_ = {id(origin): origin for x in inputs for origin in self.origins.get(_storage(x), [x.meta])}
        for x in outputs:
            self.in_memory.discard(_storage(x))  # a freed storage may have had the same id
            self.origins[_storage(x)] = [x.meta] if expensive else list(from_.values())
        if expensive:
            self.in_memory |= {_storage(x) for x in (outputs + inputs if self.inputs else outputs)}
        return result


def _storage(x: Sized) -> int:
    return id(x.meta.untyped_storage())
