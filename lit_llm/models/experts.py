"""A mixture of experts in the place of a block's MLP.

Tokens are sorted by expert, so that an expert's tokens are consecutive rows, and each matrix of all experts is one operator.
No token is dropped, whatever the load.

Shape letters: B sequences, T positions, N = B · T tokens, k experts of a token, M = N · k rows, d ``n_embd``, f hidden width of
an expert, E experts, i inputs and o outputs of a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops
from lit_llm.models.expert_shard import Dispatch, ExpertShard, Reordered
from lit_llm.models.mlp import MLP, Activation
from lit_llm.models.router import Router, RouterSums


class StackedLinear(nn.Module):
    """Linear layers of E experts: one parameter holds the matrices of all, and one the biases."""

    is_stacked = True
    """Tells `lit_llm.optim.parameter_groups` that `weight` is a stack of E matrices, and `bias` a stack of E vectors."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply expert e's layer to the rows ends[e-1]…ends[e]-1 (for e = 0 from row 0): (M, i) → (M, o).

        Args:
            ends: (E,) int32, the end of each expert's rows; the last end is M.
        """
        weight = differentiable_part(self.weight)
        bias = None if self.bias is None else differentiable_part(self.bias)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        y = grouped_linear(x, weight, ends)
        if bias is None:
            return y
        # The bias is a product with a column of ones: in the backward pass, the sum over an expert's rows has a fixed order.
        return y + grouped_linear(x.new_ones(x.size(0), 1), bias[..., None], ends)


class Experts(nn.Module):
    """A mixture of experts: a router, the routed experts, and the shared experts as one MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(moe, config.n_embd)
        self.activate = Activation(config)
        width, bias = moe.width(config.hidden_width), config.has_bias("mlp")
        self.up = StackedLinear(moe.experts, config.n_embd, width, bias=bias)
        self.gate = StackedLinear(moe.experts, config.n_embd, width, bias=bias) if config.gated else None
        self.project = StackedLinear(moe.experts, width, config.n_embd, bias=bias)
        self.shared = MLP(config, shared) if (shared := moe.width_of_shared(config.hidden_width)) else None
        self.shard: ExpertShard | None = None  # set if experts have a mesh of their own

    @property
    def is_shared(self) -> bool:
        """Whether each rank has only a part of the experts (expert parallelism), so that ranks exchange rows."""
        return self.shard is not None and self.shard.ranks > 1

    @property
    def stacks(self) -> list[StackedLinear]:
        """The linear layers of the routed experts: up, gate (if the MLP is gated) and project."""
        return [stack for stack in (self.up, self.gate, self.project) if stack is not None]

    def forward(self, x: Tensor, drops: Drops | None, counted: Tensor | None) -> tuple[Tensor, RouterSums | None]:
        """Apply the mixture: (B, T, d) → (B, T, d), and the router's sums over the positions in `counted`.

        Args:
            counted: (B, T) bool: the positions whose targets count. None: the sums are None.
        """
        rows = x.flatten(0, 1)  # (N, d)
        routing = self.router(rows)
        experts, k = routing.experts.flatten(), routing.experts.size(1)  # (M,)
        order = experts.argsort(stable=True)
        back = order.argsort()
        numbers = torch.arange(self.router.config.experts, device=x.device)
        ends = torch.searchsorted(experts[order], numbers, right=True, out_int32=True)  # (E,)
        sent = _Send.apply(rows, order, back, k)  # (M, d)
        if self.shard is None:
            outputs = self._compute(sent, ends)
        else:
            dispatch = Dispatch(self.shard, ends, sent.size(0))
            outputs = dispatch.to_tokens(self._compute(dispatch.to_experts(sent), dispatch.ends))
        y = Reordered.apply(outputs, back, order).unflatten(0, (-1, k))  # (N, k, d)
        out = (y * routing.weights.to(y.dtype)[..., None]).sum(dim=1).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x, drops)
        return out, None if counted is None else self.router.sums(routing, counted)

    def _compute(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows, which end before the row number in `ends` (E,): (M, d) → (M, d)."""
        up = self.up(x, ends)  # (M, f)
        hidden = self.activate(up) if self.gate is None else self.activate(self.gate(x, ends)) * self.activate.gated(up)
        return self.project(hidden, ends)


class _Send(Function):
    """Copies tokens to rows sorted by expert: (N, d) → (M, d). A token's gradient is a sum over its k rows in fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


# -- products of each expert's rows ----------------------------------------------------------------------------------------

# Custom operators, so that compiled graphs, recomputation and memory traces see one operator, whose sizes do not depend on the
# load. In fp32, `F.grouped_mm` itself cannot infer its output's size from tensors without data.


def _linear_of_each(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if len(x) and _can_be_grouped(x, weight):
        return F.grouped_mm(x, weight.mT, offs=ends)
    y = x.new_empty(x.size(0), weight.size(1))
    for rows, matrix in zip(_slices(ends), weight.unbind(), strict=True):
        torch.mm(x[rows], matrix.mT, out=y[rows])
    return y


def _outer_of_each(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if len(x) and _can_be_grouped(gradient, x):
        return F.grouped_mm(gradient.mT, x, offs=ends)
    products = x.new_empty(ends.numel(), gradient.size(1), x.size(1))
    for rows, out in zip(_slices(ends), products.unbind(), strict=True):
        torch.mm(gradient[rows].mT, x[rows], out=out)
    return products


def _can_be_grouped(*matrices: Tensor) -> bool:
    """Whether `F.grouped_mm` accepts these matrices: bf16, or fp32 on a CPU, with rows at multiples of 16 bytes."""
    first = matrices[0]
    kinds = (torch.bfloat16, torch.float32) if first.device.type == "cpu" else (torch.bfloat16,)
    return first.dtype in kinds and all(
        size * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        for x in matrices
        for size in x.shape[-2 if x.ndim == 3 else -1 :]
    )


def _slices(ends: Tensor) -> list[slice]:
    """Return each expert's slice of rows. The host waits for a GPU."""
    stops = ends.tolist()
    return [slice(first, end) for first, end in zip([0, *stops], stops, strict=False)]


grouped_linear = torch.library.custom_op(
    "lit_llm::grouped_linear", _linear_of_each, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
"""x (M, i), W (E, o, i), ends (E,) → (M, o): the product x Wᵀ of each expert's rows with the expert's matrix."""
grouped_outer = torch.library.custom_op(
    "lit_llm::grouped_outer", _outer_of_each, mutates_args=(), schema="(Tensor gradient, Tensor x, Tensor ends) -> Tensor"
)
"""Output gradient (M, o), x (M, i), ends (E,) → (E, o, i): the gradients of the matrices, zero for an expert without rows."""


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.size(0), weight.size(1))


@grouped_outer.register_fake
def _(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.size(0), gradient.size(1), x.size(1))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # the gradient of a sum is expanded, which `grouped_mm` does not take
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return (
        grouped_linear(gradient, weight.mT, ends) if needs_x else None,
        grouped_outer(gradient, x, ends) if needs_weight else None,
        None,
    )


grouped_linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.lit_llm.grouped_linear)
def _(x, weight, ends, *_, **__):  # type: ignore[no-untyped-def]
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.lit_llm.grouped_outer)
def _(gradient, x, ends, *_, **__):  # type: ignore[no-untyped-def]
    return 2 * gradient[0] * gradient[1] * x[1]
