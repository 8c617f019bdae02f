"""A model with the sizes of one rank under tensor and expert parallelism, for a plan: no process group, no data.

A change of `lit_llm.distributed.tensor_parallel` needs the same change here (tests/plan/test_memory.py compares the two). A
rank has 1 / ranks of the heads, of the hidden width and of the vocabulary. A rank has T / ranks positions of the residual
stream, gathers all T positions before attention, MLP and loss, and keeps its own positions of their results.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lit_llm.core._torch import COLLECTIVES
from lit_llm.models.config import GPTConfig
from lit_llm.models.expert_shard import ExpertShard
from lit_llm.models.experts import Experts
from lit_llm.models.gpt import GPT
from lit_llm.models.latent_attention import LatentAttention
from lit_llm.models.loss import VocabularyShards
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.models.short_convolution import ShortConvolution


def local_config(config: GPTConfig, ranks: int) -> GPTConfig:
    """The configuration of a model as large as one rank's part of `config` under tensor parallelism over `ranks` ranks.

    `block_size` stays, because each rank sees all positions.
    """
    if ranks == 1:
        return config
    moe = config.moe
    if moe is not None:  # experts stay whole
        shared = moe.width_of_shared(config.hidden_width)
        more = {"shared_experts": 1, "shared_width": shared // ranks} if shared else {}
        moe = replace(moe, expert_width=moe.width(config.hidden_width), **more)  # type: ignore[arg-type]
    return replace(
        config,
        moe=moe,
        n_head=config.n_head // ranks,
        n_kv_head=config.kv_heads // ranks,
        head_dim=config.resolved_head_dim if config.latent is None else None,
        mlp_width=config.hidden_width // ranks,
        vocab_size=config.padded_vocab_size // ranks,
        pad_vocab_to=1,
        eos_id=None if config.eos_id is None else 0,
    )


def share_experts(model: GPT, expert: int, tensor_parallel: int) -> None:
    """Cut a model's experts to one rank's part, in place, and make layers exchange tokens' activations between ranks.

    `expert`: number of ranks that share a layer's experts. `tensor_parallel`: of ranks that share matrices. Both 1: no change.
    """
    if expert == tensor_parallel == 1:
        return
    for block in model.blocks:
        if isinstance(block.mlp, Experts):
            block.mlp.shard = ExpertShard("expert", expert, tensor_parallel / expert)
            for stack in block.mlp.stacks:
                for name, whole in list(stack.named_parameters()):
                    setattr(stack, name, nn.Parameter(whole.detach()[: len(whole) // expert].clone()))


def split_positions(model: GPT, ranks: int) -> None:
    """Split the T positions of the residual stream over `ranks` ranks, by hooks that gather before, and scatter after, modules.

    The model's own code pads the positions, and splits the rows of dropout over ranks.
    """
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    model.vocabulary_shards = VocabularyShards(group, 0)

    def scatter(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return _Moved.apply(output, ranks, False, module is model.positions)

    def gather(module: Any, inputs: Any) -> Any:
        return _Moved.apply(inputs[0], ranks, True, False), *inputs[1:]

    model.embedding.register_forward_hook(scatter)
    if model.positions is not None:
        model.positions.register_forward_hook(scatter)
    for block in model.blocks:
        if isinstance(block.attention, LatentAttention):
            for layer in (block.attention.key, block.attention.value):
                layer.register_forward_pre_hook(lambda module, inputs: _Summed.apply(inputs[0]))
        for module in (block.attention, block.mlp.shared if isinstance(block.mlp, Experts) else block.mlp):
            if module is not None:
                module.register_forward_pre_hook(gather)  # type: ignore[union-attr]
                module.register_forward_hook(scatter)  # type: ignore[union-attr]
        for module in block.children():
            if isinstance(module, ShortConvolution):
                module.stream = SequenceShard("tensor", ranks, 0, "heads")
    model.norm.register_forward_hook(lambda module, inputs, output: _Moved.apply(output, ranks, True, False))


class _Summed(Function):
    """Autograd function that returns its input, which is equal on all ranks. Backward sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return COLLECTIVES.all_reduce(gradient, "sum", "tensor")


class _Moved(Function):
    """Autograd function that all-gathers positions, (B, T / ranks, d) → (B, T, d), or reduce-scatters; backward the opposite.

    `gathers`: whether the forward pass gathers. `is_whole`: x is complete on each rank, so a rank takes its part without a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, gathers: bool, is_whole: bool) -> Tensor:
        ctx.back = ranks, not gathers
        return x.chunk(ranks, dim=1)[0].clone() if is_whole else _moved(x, ranks, gathers=gathers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, gathers = ctx.back
        return _moved(gradient, ranks, gathers=gathers), None, None, None


def _moved(x: Tensor, ranks: int, *, gathers: bool) -> Tensor:
    """All-gather (`gathers`) or reduce-scatter a tensor along its positions (dimension 1), with a copy, as DTensor does."""
    if gathers:
        return torch.cat(COLLECTIVES.all_gather_into_tensor(x, ranks, "tensor").chunk(ranks), dim=1)
    return COLLECTIVES.reduce_scatter_tensor(torch.cat(x.chunk(ranks, dim=1)), "sum", ranks, "tensor")
