"""What a compiled block keeps for its backward pass, as torch's min-cut partitioner decides (torch/_functorch/partitioners.py).

A matrix product or attention is never computed twice, so its result is kept if the backward pass needs it. Their inputs are
kept too, because the gradients of weights read them from memory. All else (elementwise operators, casts, norms) is computed
again from these, within the kernels of the backward pass. With recomputation of mode cheap, inputs are computed again as well.

The partitioner also keeps the statistics of norms. tests/plan/test_compiled_blocks.py compares with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

from lit_llm.core._torch import DispatchMode, tensors_in
from lit_llm.distributed.activation_checkpointing import keep_expensive
from lit_llm.plan.recorder import Recorder, Sized


def keep_as_compiled(block: nn.Module, recorder: Recorder, *, inputs: bool) -> None:
    """Let the trace of a block keep what its compiled form does, in place.

    Args:
        inputs: also keep inputs of matrix products and attention.
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
    """A tensor that autograd keeps: itself, or if it is computed again, what it is computed from."""

    def __init__(self, tensor: Sized) -> None:
        self.tensor: Sized | None = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.origins: list[Tensor] = []


class _Kept(DispatchMode):
    """Notes from which tensors each result can be computed again.

    Attributes:
        origins: for the storage of each result, the tensors on the meta device it is computed from: results of products and
            attention, and inputs of the block.
        in_memory: storages that products and attention write, or read.
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
        self.recorder.exclude((again,))  # within a kernel
        return again

    def settle(self) -> None:
        """Let go of what is computed again."""
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
            self.in_memory.discard(_storage(x))  # of a storage that was freed
            self.origins[_storage(x)] = [x.meta] if expensive else list(from_.values())
        if expensive:
            self.in_memory |= {_storage(x) for x in (outputs + inputs if self.inputs else outputs)}
        return result


def _storage(x: Sized) -> int:
    return id(x.meta.untyped_storage())
