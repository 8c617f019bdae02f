"""Bytes of optimizer state, and the temporary bytes and Muon's FLOPs of an optimizer step.

On a device mesh, one rank of a pipeline stage, the matrix's owner, orthogonalises a whole matrix for Muon
(`lit_llm.optim.exchange`). The ranks share the experts of each layer. `lit_llm.optim.owners` chooses the owners.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from lit_llm.core.memory import MUON_BATCH_NUMEL
from lit_llm.distributed.keep_rule import sharded_dimension
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.plan.weights import Weight, Weights

if TYPE_CHECKING:
    import torch

_ONE = ("Lion", "Muon", "RMSprop", "Adagrad", "Adafactor", "ASGD")
_TWO = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop")
STATE_COPIES = {"SGD": 0, **dict.fromkeys(_ONE, 1), **dict.fromkeys(_TWO, 2)}
"""{optimizer: number of state tensors of a parameter's size, without the tensors that STATE_OPTIONS add}. `_state_elements`
counts the state of MuonAdamW and of Adafactor's matrices."""

STATE_OPTIONS = ("momentum", "centered", "amsgrad")
"""Options that add a state tensor of a parameter's size: momentum of SGD and RMSprop, centered of RMSprop, amsgrad of Adam."""

TORCH_MUON = "torch.optim.Muon"
"""The name of torch's Muon in a plan, where "Muon" means a class with this name of any other package."""


@dataclass(frozen=True)
class Optimizer:
    """Record of an optimizer: its class name and the options that affect memory.

    `more_states`: number of STATE_OPTIONS that are set. `fused`: whether the update needs no temporary tensors. `ns_dtype`:
    dtype of Muon's Newton-Schulz iteration; auto: bfloat16 on a GPU, float32 on a CPU. `normuon`: whether Muon keeps a second
    moment for each row (NorMuon).
    """

    name: str
    more_states: int = 0
    fused: bool = False
    ns_dtype: str = "auto"
    normuon: bool = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Optimizer:
        """Return the record of a torch optimizer: its class name and its options that affect memory."""
        from lit_llm.optim.torch_muon import TorchMuon  # imports torch

        groups, name = optimizer.param_groups, type(optimizer).__name__
        if isinstance(optimizer, TorchMuon):
            return cls(TORCH_MUON, ns_dtype="bfloat16")
        return cls(
            name,
            more_states=max(sum(bool(group.get(option)) for option in STATE_OPTIONS) for group in groups),
            fused=all(group.get("fused") for group in groups) or name == "AdamW8bit",
            ns_dtype=next((group["ns_dtype"] for group in groups if "ns_dtype" in group), "auto"),
            normuon=any(group.get("normuon_beta2") is not None for group in groups),
        )

    @property
    def is_known(self) -> bool:
        return self.name in STATE_COPIES or self.is_muon or self.name == "AdamW8bit"

    @property
    def is_muon(self) -> bool:
        """Whether the optimizer orthogonalises hidden matrices, and trains all other parameters with AdamW."""
        return self.name in ("MuonAdamW", TORCH_MUON)

    def newton_schulz_bytes(self, *, cuda: bool) -> int:
        """Return the bytes of an element in Muon's Newton-Schulz iteration. `cuda`: whether the iteration runs on a GPU."""
        dtype = ("bfloat16" if cuda else "float32") if self.ns_dtype == "auto" else self.ns_dtype
        return {"float32": 4, "bfloat16": 2}[dtype]


def state_bytes(optimizer: Optimizer, weights: Weights, parameter_bytes: int) -> float:
    """Return the bytes of optimizer state for `weights`: 8 per fp32 parameter for AdamW. Unknown optimizers count as AdamW.

    NorMuon's row state (`row_state_bytes`) is not included. State has the dtype of the parameters, except for AdamW8bit, which
    keeps two one-byte states, each with an fp32 scale per block of 256 values. Adafactor keeps one number per row and one per
    column of the last two dimensions. Frozen weights have no state.
    """
    trainable = [weight for weight in weights if weight.group is not None]
    if optimizer.name == "AdamW8bit":
        return sum(w.total for w in trainable) * 2 * (1 + 4 / 256)
    return int(sum(w.itemsize(parameter_bytes) * _state_elements(optimizer, w) * w.share for w in trainable))


def row_state_bytes(optimizer: Optimizer, whole: Weights, parameter_bytes: int, layout: Layout | None = None) -> int:
    """Return the bytes of NorMuon's state on a rank: one number for each row of a hidden matrix. 0 without NorMuon.

    Each rank stores the numbers of all rows of a matrix, so `whole` must be the unsplit weights. Of an expert layer, a rank
    stores only the rows of the experts that the rank orthogonalises. `layout` None: one device.
    """
    if not optimizer.normuon:
        return 0
    shared, total = MuonWork.of((), layout), 0
    for weight in filter(_takes_muon, whole):
        rows = shared.experts_of_rank(weight.shape) * weight.shape[1] if weight.group == "experts" else weight.shape[0]
        total += weight.itemsize(parameter_bytes) * rows
    return total


def _takes_muon(weight: Weight) -> bool:
    """Whether MuonAdamW orthogonalises the weight: a matrix, or a 3-D stack of experts, but no 3-D convolution."""
    return len(weight.shape) == {"matrix": 2, "experts": 3}.get(weight.group or "")


def _state_elements(optimizer: Optimizer, weight: Weight) -> int:
    """Return the number of elements in the optimizer's state of `weight`."""
    elements = math.prod(weight.shape)
    if optimizer.name == "Adafactor" and elements and len(weight.shape) > 1:
        return elements // weight.shape[-1] + elements // weight.shape[-2]
    if optimizer.is_muon:
        return elements if _takes_muon(weight) else 2 * elements
    return (STATE_COPIES.get(optimizer.name, 2) + optimizer.more_states) * elements


def work_bytes(optimizer: Optimizer, weights: Weights, parameter_bytes: int, *, cuda: bool) -> int:
    """Return the peak temporary bytes of an optimizer step, without parameters, gradients and state. For Muon, call
    `MuonWork.work_bytes` instead.

    Args:
        cuda: whether the step runs on a GPU, where torch's unfused optimizers process all tensors at once, and Lion keeps
            copies until `found_inf` is applied.
    """
    trainable, groups = [weight for weight in weights if weight.group is not None], Counter[str]()
    for weight in trainable:
        groups[str(weight.group)] += weight.total
    largest_group = max(groups.values(), default=0)
    parameter_bytes = max((weight.itemsize(parameter_bytes) for weight in trainable), default=parameter_bytes)
    if optimizer.name == "Lion":
        wide = 8 if parameter_bytes < 4 else 0  # the parameter and its update in fp32
        largest = max((math.prod(weight.shape) for weight in trainable), default=0)
        if not cuda:
            return largest * (parameter_bytes + wide) if wide else largest_group * parameter_bytes
        part = min(max(MUON_BATCH_NUMEL, largest), largest_group)  # a part is within one group
        return part * (3 * parameter_bytes + wide)
    if optimizer.fused or optimizer.name == "SGD":
        return 0
    if cuda:
        return groups.total() * parameter_bytes
    # One tensor at a time: its square root and quotient, while the previous tensor's quotient is still alive.
    order = ["matrix", "embedding", "vector", *groups]
    in_order = sorted(trainable, key=lambda w: order.index(str(w.group)))
    sizes = [0, *(w.total for w in in_order)]
    return max((before + 2 * size for before, size in itertools.pairwise(sizes)), default=0) * parameter_bytes


# -- Muon -------------------------------------------------------------------------------------------------------------

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MuonWork:
    """Record of the hidden matrices that Muon orthogonalises in a pipeline stage, and of the ranks that share this work.

    Attributes:
        matrices: unsharded shapes of the trainable matrices, block by block.
        stacks: (experts, rows, columns) of each trainable stack of experts' matrices, block by block.
        dimensions: sizes of the mesh dimensions that shard a matrix, the innermost first. (): no mesh.
        rows: number of replicas: groups of `shards` ranks, each of which has a whole copy of every matrix.
        expert: number of expert-parallel ranks in such a group.
        normuon: whether the optimizer is NorMuon. On a mesh, ranks exchange several matrices at a time (`optim/exchange.py`),
            and with NorMuon also one fp32 number for each row of these matrices.
    """

    matrices: Shapes
    stacks: Shapes = ()
    dimensions: tuple[int, ...] = ()
    rows: int = 1
    expert: int = 1
    normuon: bool = False

    @classmethod
    def of(cls, whole: Weights, layout: Layout | None = None, *, normuon: bool = False) -> MuonWork:
        """Return Muon's work for the unsplit weights `whole` on the ranks of `layout`. `layout` None: one device."""
        layout = layout or Layout()
        taken = [weight for weight in whole if _takes_muon(weight)]
        matrices, stacks = (tuple(weight.shape for weight in taken if len(weight.shape) == n) for n in (2, 3))
        return cls(matrices, stacks, *layout.owners, layout.expert, normuon)

    @property
    def shards(self) -> int:
        """Number of ranks among which a matrix is sharded."""
        return math.prod(self.dimensions)

    def divides(self, stack: tuple[int, ...]) -> bool:
        """Whether each expert of `stack` (experts, rows, columns) is sharded: ranks cannot share whole experts equally."""
        return sharded_dimension((stack[0] // self.expert, *stack[1:]), self.shards // self.expert) > 0

    def experts_of_rank(self, stack: tuple[int, ...]) -> int:
        """Return how many experts of `stack` a rank orthogonalises: those it stores, or if sharded, those it has a shard of."""
        return stack[0] // self.expert if self.divides(stack) else -(-stack[0] // self.shards)

    def flops(self, iterate_bytes: int) -> float:
        """Return a rank's mean FLOPs of Newton-Schulz iterations in an update. `iterate_bytes`: bytes of an element in them."""
        from lit_llm.optim.owners import newton_schulz_flops  # the package imports torch

        of = partial(newton_schulz_flops, element_bytes=iterate_bytes)
        matrices = float(sum(of(*shape) for shape in self.matrices))
        stacks = float(sum(self.experts_of_rank(stack) * of(*stack[1:]) for stack in self.stacks))
        return matrices / (self.shards * self.rows) + stacks

    def work_bytes(self, parameter_bytes: int, iterate_bytes: int, *, cuda: bool) -> int:
        """Return the peak temporary bytes of an optimizer step on the rank that needs most.

        Args:
            parameter_bytes: bytes of an element of a parameter and of its momentum.
            iterate_bytes: bytes of an element in the Newton-Schulz iteration and in messages.
            cuda: whether the step runs on a GPU, where copies of the momentum stay until `found_inf` is applied.
        """
        return max(
            self._bytes_of_matrices(parameter_bytes, iterate_bytes, cuda=cuda),
            self._bytes_of_experts(parameter_bytes, iterate_bytes, cuda=cuda),
        )

    def _bytes_of_matrices(self, p: int, w: int, *, cuda: bool) -> int:
        peak, shards, rows = 0, self.shards, self.rows
        for own, of_row, heights in _turns(self.matrices, shards, rows):
            squares = 4 * heights if self.normuon else 0
            part = sum(of_row) / shards  # elements of this rank's parts
            whole, largest = sum(math.prod(each) for each in own), max(own, key=math.prod)
            moments = [part * p * (2 if cuda else 1)]  # the momentum, and its copy
            if shards * rows == 1:
                sizes = [math.prod(shape) for shape in own]
                moments += [  # updates of earlier matrices, directions of the others
                    sum(sizes[:i]) * w + sum(sizes[i:]) * p + _iterating(shape, w, cuda=cuda) for i, shape in enumerate(own)
                ]
            else:
                moments.append(part * (p + w if p != w else p))  # directions, and their copies in the dtype of messages
                moments += [2 * part * w, (part + whole) * w, 2 * whole * w + squares]  # buffers that are sent and received
                moments.append(whole * w + _iterating(largest, w, cuda=cuda))
                moments.append(part * w * (2 if rows > 1 else 1) + (part * p if cuda else 0) + squares)
            peak = max(peak, int(max(moments)))
        return peak

    def _bytes_of_experts(self, p: int, w: int, *, cuda: bool) -> int:
        from lit_llm.optim.owners import turns  # the package imports torch

        peak, divided = 0, [self.divides(stack) for stack in self.stacks]
        whole = [self.experts_of_rank(stack) * math.prod(stack[1:]) for stack in self.stacks]
        parts = [math.prod(s) // self.shards if d else n for n, s, d in zip(whole, self.stacks, divided, strict=True)]
        for numbers in turns(parts, [0] * len(parts), MUON_BATCH_NUMEL):
            momenta = sum(parts[i] for i in numbers) * p
            largest, i = max((whole[i], i) for i in numbers)
            gathered = largest * p if divided[i] else 0
            iterating = gathered + (largest * w if w != p else 0) + _iterating(self.stacks[i][1:], w, cuda=cuda)
            peak = max(peak, momenta * (2 if cuda else 1), momenta + 2 * gathered, momenta + iterating)
        return peak


def _iterating(shape: tuple[int, ...], w: int, *, cuda: bool) -> int:
    """Return the peak bytes of Newton-Schulz iterations on a matrix of elements of `w` bytes, the largest of: two iterates and
    a polynomial; an iterate and the squares that make the polynomial; on a CPU, a 16-bit iterate and its fp32 copy."""
    from lit_llm.optim.owners import steps_together  # the package imports torch

    r, c = sorted(shape)
    squares = 4 if steps_together(r, c, w) > 1 else 2
    return max((2 * r * c + r * r) * w, (r * c + squares * r * r) * w, 0 if cuda or w == 4 else r * c * (w + 4))


@lru_cache(maxsize=256)
def _turns(shapes: Shapes, shards: int, rows: int) -> list[tuple[Shapes, tuple[int, ...], int]]:
    """Return a tuple for each turn (matrices that are exchanged together, `owners.turns`) and each owner of matrices in it:
    (shapes of the owner's matrices, elements of each matrix that its replica owns, rows of all matrices of the turn)."""
    from lit_llm.optim.owners import owners, turns

    sizes = [math.prod(shape) for shape in shapes]
    chosen = owners(shapes, shards * rows)
    by_rank: dict[tuple[Shapes, tuple[int, ...], int], None] = {}
    for numbers in turns(sizes, chosen, MUON_BATCH_NUMEL):
        heights = sum(shapes[i][0] for i in numbers)
        for rank in {chosen[i] for i in numbers}:
            own = tuple(shapes[i] for i in numbers if chosen[i] == rank)
            by_rank[own, tuple(sizes[i] for i in numbers if chosen[i] // shards == rank // shards), heights] = None
    return list(by_rank)
