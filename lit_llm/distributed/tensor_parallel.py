"""Tensor parallelism of a GPT."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import VocabularyShards


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Megatron's tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, arXiv 2205.05198) over a 1-D mesh.

    Attention heads and hidden units are split: first matrices by columns, second ones by rows. The vocabulary is split by rows
    of embedding and head. Norms, residuals and dropout work on (B, T / ranks, d), this rank's part of the sequence. An
    all-gather precedes attention and MLP, a reduce-scatter follows them. The loss never gathers the logits.
    """
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": _GatheredNorm(),
    }
    if model.positions is not None:
        plan["positions"] = _SplitPositions()
    parallelize_module(model, mesh, plan)
    if model.head is not None:
        distribute_module(model.head, mesh, partial(_distribute, Shard(0)))
    for block in model.blocks:
        attention: nn.Module = block.attention  # type: ignore[assignment]
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        )
        block_plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.project": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"mlp.{name}": ColwiseParallel() for name in ("up", "gate") if getattr(block.mlp, name) is not None},
            "mlp.project": RowwiseParallel(output_layouts=Shard(1)),
        }
        if isinstance(attention.query_norm, nn.RMSNorm):
            # The input is (B, T, H / ranks, h): the norm's weight is replicated, and its gradient is summed over the ranks,
            # as for a norm on a part of the sequence.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            block_plan |= {"attention.query_norm": heads, "attention.key_norm": heads}
        parallelize_module(block, mesh, block_plan)
    rows = model.config.padded_vocab_size // mesh.size()
    model.vocabulary_shards = VocabularyShards(mesh.get_group(), mesh.get_local_rank() * rows)


class _SplitPositions(ParallelStyle):
    """A replicated position table. Each rank returns the rows of its part: (1, T) → (1, T / ranks, d)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partial(_distribute, Replicate()),
            lambda mod, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),  # type: ignore[arg-type]
            lambda mod, output, mesh: output.redistribute(placements=[Shard(1)]).to_local(),
        )


class _GatheredNorm(SequenceParallel):
    """The last norm: (B, T / ranks, d) → (B, T, d) as a plain tensor, for the loss.

    Each rank's loss gives the gradient through its rows of the vocabulary. `Partial` sums them over the ranks.
    """

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Tensor:
        return outputs.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _distribute(placement: Replicate | Shard, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def tensor_parallel_problems(config: GPTConfig, ranks: int) -> list[str]:
    """Every reason why a model cannot be split over `ranks` tensor-parallel ranks, one sentence each."""
    found = []

    def check(what: str, size: int, flag: str) -> None:
        if size % ranks:
            fitting = max(k for k in range(1, ranks) if size % k == 0)
            found.append(
                f"tensor_parallel={ranks} does not divide {what} = {size}; the nearest smaller number that does is {fitting} "
                f"(--trainer.strategy.tensor_parallel, or {flag})"
            )

    check("model.n_head", config.n_head, "--model.n_head")
    if config.kv_heads != config.n_head:
        check("model.n_kv_head", config.kv_heads, "--model.n_kv_head")
    check("the MLP's hidden width", config.hidden_width, "--model.mlp_width")
    check("model.block_size", config.block_size, "--model.block_size")
    if config.vocab_size is not None:
        check("the padded vocabulary", config.padded_vocab_size, "--model.pad_vocab_to")
    elif config.pad_vocab_to % ranks:
        check("model.pad_vocab_to", config.pad_vocab_to, "--model.pad_vocab_to")
    return found
