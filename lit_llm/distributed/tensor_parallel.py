"""Tensor parallelism of a GPT: each rank has a part of every matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.block import AheadInput
from lit_llm.models.dropout import Drops
from lit_llm.models.experts import Experts
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.latent_attention import LatentAttention
from lit_llm.models.lora import LoRALinear
from lit_llm.models.loss import VocabularyShards
from lit_llm.models.self_attention import Attention
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.models.short_convolution import ShortConvolution


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Apply Megatron's tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, arXiv 2205.05198), in place.

    Attention heads and MLP hidden units are split over the 1-D mesh: first matrices by columns, second matrices by rows. Rows
    of embedding and head split the vocabulary. Norms, residuals and dropout work on (B, T / ranks, d), this rank's part of the
    sequence. An all-gather precedes attention and MLP; a reduce-scatter follows each. The loss never gathers the logits. The
    projections to latents of attention are replicated: they are narrow, and all heads read the whole latent.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    plan: dict[str, ParallelStyle] = {
        "embedding": _SplitEmbedding(),
        "norm": _GatheredNorm(),
    }
    if model.positions is not None:
        plan["positions"] = _Replicated(Replicate(), Shard(1))  # (B, T) → (B, T / ranks, d), or B is 1
    parallelize_module(model, mesh, plan)
    if model.head is not None:
        distribute_module(model.head, mesh, partial(distribute_parameters, Shard(0)))
    for block in model.blocks:
        attention: Attention | LatentAttention = block.attention  # type: ignore[assignment]
        norms = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        # These norms return plain tensors, because they are added to the residual stream, which is one.
        norms |= {name: SequenceParallel(use_local_output=True) for name in ("attention_output_norm", "mlp_output_norm")}
        block_plan: dict[str, ParallelStyle] = {
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), *(None,) * 4), desired_input_layouts=(Replicate(), *(None,) * 4)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.project": RowwiseParallel(output_layouts=Shard(1)),
        }
        if isinstance(block.ahead, AheadInput):  # every rank projects its positions
            distribute_parameters(Replicate(), "", block.ahead, mesh)
            norms_ahead = ("ahead.hidden_norm", "ahead.embedding_norm")
            block_plan |= {name: SequenceParallel(use_local_output=True) for name in norms_ahead}
        mlp, name = (block.mlp.shared, "mlp.shared") if isinstance(block.mlp, Experts) else (block.mlp, "mlp")
        if model.config.input_convolution is not None:  # it computes on plain tensors
            norms |= {name: SequenceParallel(use_local_output=True) for name in norms}
        if isinstance(block.mlp, Experts):  # each rank's experts get its part of the sequence
            distribute_parameters(Replicate(), "", block.mlp.router, mesh)
            norms |= {"mlp_norm": SequenceParallel(use_local_output=True)}
        if mlp is not None:
            block_plan |= {
                name: PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
                **{f"{name}.{each}": ColwiseParallel() for each in ("up", "gate") if getattr(mlp, each) is not None},
                f"{name}.project": RowwiseParallel(output_layouts=Shard(1)),
            }
        block_plan |= {name: style for name, style in norms.items() if getattr(block, name) is not None}
        if isinstance(attention, LatentAttention):
            for module in attention.of_latents:
                distribute_parameters(Replicate(), "", module, mesh)
        elif attention.query_norm is not None:
            # The input of a norm over one head is (B, T, H / ranks, h). The norm's weight is replicated, and its gradient is
            # summed over the ranks, as for a norm on a part of the sequence. The input of a norm over all heads is
            # (B, T, H·h / ranks). Each rank gathers it, because the mean square of a row needs all columns.
            heads: ParallelStyle = _Replicated(Shard(2), Shard(2))
            if attention.norm_heads:
                heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            block_plan |= {"attention.query_norm": heads, "attention.key_norm": heads}
        parallelize_module(block, mesh, block_plan)
        _split_adapters(block, mesh)
        attention.first_head = mesh.get_local_rank() * model.config.n_head // mesh.size()
        if isinstance(attention, Attention) and attention.sinks is not None:
            attention.sinks = nn.Parameter(distribute_tensor(attention.sinks, mesh, [Shard(0)], src_data_rank=None))
        for module in attention.children():
            if isinstance(module, ShortConvolution):
                distribute_module(module, mesh, partial(distribute_parameters, Shard(0)))
        for module in block.children():
            if isinstance(module, ShortConvolution):  # all channels of this rank's part of the sequence
                distribute_parameters(Replicate(), "", module, mesh)
                module.stream = SequenceShard(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), "heads")
    for name in frozen:  # torch's styles for norms make new parameters, which are trained
        model.get_parameter(name).requires_grad_(False)
    rows = model.config.padded_vocab_size // mesh.size()
    model.vocabulary_shards = VocabularyShards(mesh.get_group(), mesh.get_local_rank() * rows)


def _split_adapters(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split the LoRA factors of a block's layers as the layers are split: B by columns, or A by rows. In place.

    Each rank has the whole other factor. An adapter computes its update on a rank's parts without communication: some columns
    of the output, or a partial sum of it.
    """
    for module in block.modules():
        if isinstance(module, LoRALinear):
            assert isinstance(module.weight, DTensor)
            (placed,) = module.weight.placements
            by_rows = placed == Shard(1)
            where = {"lora_a": placed if by_rows else Replicate(), "lora_b": Replicate() if by_rows else placed}
            for name, placement in where.items():
                whole = torch.empty(getattr(module, name).shape, dtype=torch.float32, device="meta")
                module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None)))
            if by_rows:
                module.first_input = mesh.get_local_rank() * module.in_features // mesh.size()
            of_parts = _update_of_whole if placed == Replicate() else _update_of_parts
            module.update = partial(of_parts, module.update)  # type: ignore[method-assign]


_Update = Callable[[Tensor, Tensor, Tensor, Drops | None], Tensor]


def _update_of_whole(update: _Update, x: DTensor, a: DTensor, b: DTensor, drops: Drops | None) -> DTensor:
    """Compute `LoRALinear.update` of a replicated layer: every rank computes the same update, and gets whole gradients."""
    y = update(x.to_local(), a.to_local(), b.to_local(), drops)
    return DTensor.from_local(y, x.device_mesh, [Replicate()], run_check=False)


def _update_of_parts(update: _Update, x: DTensor, a: DTensor, b: DTensor, drops: Drops | None) -> DTensor:
    """Compute `LoRALinear.update` of a split layer: this rank's columns of the update or, if split by rows, a partial sum."""
    # The redistributions do nothing forward. Backward, they sum the gradients of A and B over the ranks; the gradient of x is
    # summed later, once for all layers that share x.
    a, b = (factor.redistribute(placements=factor.placements) for factor in (a, b))
    part = update(differentiable_part(x), differentiable_part(a), differentiable_part(b), drops)
    by_columns = isinstance(x.placements[0], Replicate)
    return DTensor.from_local(part, x.device_mesh, [Shard(part.ndim - 1) if by_columns else Partial()], run_check=False)


class _SplitEmbedding(ParallelStyle):
    """The parallel style of an embedding split by rows, which maps ids (B, T) to a finished plain tensor (B, T / ranks, d).

    Each rank looks up the ids of its rows, and has zeros for other ids; a reduce-scatter adds the ranks' results. torch's
    own style (2.13) allocates the gradient of all rows on every rank, and keeps its memory. torch's style also returns a tensor
    whose collective may still run, and a compiled block with such an input loses the placement of its gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(distribute_parameters, Shard(0)))
        module.forward = partial(self._look_up, module, device_mesh)
        return module

    @staticmethod
    def _look_up(module: nn.Module, mesh: DeviceMesh, ids: Tensor) -> Tensor:
        assert isinstance(module.weight, Tensor)
        weight = differentiable_part(module.weight)  # (V / ranks, d)
        rows = ids - mesh.get_local_rank() * weight.size(0)
        here = (rows >= 0) & (rows < weight.size(0))  # (B, T)
        x = F.embedding(torch.where(here, rows, 0), weight) * here[..., None]
        return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


class _Replicated(ParallelStyle):
    """The parallel style of a module with replicated parameters that computes its whole output on every rank.

    Inputs and outputs are plain tensors.

    Args:
        takes: the placement of the input, which is gathered before the module.
        gives: the placement of the output, of which each rank returns its part.
    """

    def __init__(self, takes: Placement, gives: Placement) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [self.takes], run_check=False).redistribute(placements=[Replicate()])

        def split(module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=[self.gives]).to_local()

        return distribute_module(module, device_mesh, partial(distribute_parameters, Replicate()), gather, split)  # type: ignore[arg-type]


class _GatheredNorm(SequenceParallel):
    """The parallel style of the last norm: (B, T / ranks, d) → (B, T, d) as a plain tensor, for the loss.

    The loss of a rank gives the gradient through that rank's rows of the vocabulary. `Partial` sums the ranks' gradients.
    """

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Tensor:
        return outputs.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def distribute_parameters(placement: Replicate | Shard, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters of a module, but not of submodules, by DTensors on `mesh` with `placement`. Buffers stay.

    torch's `distribute_module` calls this function for each submodule, with the submodule's `name`."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def tensor_parallel_problem(config: GPTConfig, ranks: int) -> str | None:
    """Why a model cannot be split over `ranks` tensor-parallel ranks: a sentence with the sizes that `ranks` does not divide;
    None if `ranks` divides all sizes."""
    sizes = [("model.n_head", config.n_head, "n_head")]
    if config.kv_heads != config.n_head:
        sizes.append(("model.n_kv_head", config.kv_heads, "n_kv_head"))
    if config.experts_layers < config.n_blocks:
        sizes.append(("the MLP's hidden width", config.hidden_width, "mlp_width"))
    if config.moe is not None and (shared := config.moe.width_of_shared(config.hidden_width)):
        sizes.append(("the width of the shared experts", shared, "moe.shared_width"))
    sizes.append(("model.block_size", config.block_size, "block_size"))
    if config.vocab_size is not None:
        sizes.append(("the padded vocabulary", config.padded_vocab_size, "pad_vocab_to"))
    elif config.pad_vocab_to % ranks:
        sizes.append(("model.pad_vocab_to", config.pad_vocab_to, "pad_vocab_to"))
    wrong = [(f"{what} = {size}", f"--model.{flag}") for what, size, flag in sizes if size % ranks]
    if not wrong:
        return None
    fitting = max(k for k in range(1, ranks) if not any(size % k for _, size, _ in sizes))
    named, flags = (", ".join(words) for words in zip(*wrong, strict=True))
    return (
        f"tensor_parallel={ranks} does not divide {named}: use {fitting} (--trainer.strategy.tensor_parallel {fitting}), or "
        f"change the model ({flags})"
    )
