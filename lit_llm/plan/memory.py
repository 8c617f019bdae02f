"""Peak memory per rank: weights and optimizer state, plus what a training step adds at its peak. GB = 1e9 bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.plan import muon
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.gathering import FSDP2
from lit_llm.plan.micro_batch import Step, micro_batch
from lit_llm.plan.optimizer import Optimizer, matrix_shapes, row_state_bytes, state_bytes, work_bytes
from lit_llm.plan.parameters import average_bytes, gradient_bytes, stored_bytes, weights_of
from lit_llm.plan.pipeline import StageShare, shares, weights_of_stages
from lit_llm.plan.reserved import Pools, pools_of, reserved_bytes

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig

BYTES = {  # Trainer precision -> bytes per weight, bytes per operand of a matrix product
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
}
_NO_PIPELINE = PipelineLayout(1)


@dataclass(frozen=True)
class Layout:
    """The parallel layout: pipeline · replicate · shard · context · tensor_parallel ranks.

    Attributes:
        shards: what the ranks of a shard group split: "nothing", "optimizer" (ZeRO-1), "gradients" (ZeRO-2: gradients and
            optimizer state), or "parameters" (ZeRO-3 and FSDP: all three).
        reshard: gathered weights are freed between forward and backward, and between micro-batches.
        reduce_once: gradients are reduced over shards once a step, not after each micro-batch.
        auto: of the last two, those that depend on the hardware (`lit_llm.plan.kept_whole`): "weights", "gradients".
        prefetch: number of blocks whose weights are gathered ahead.
        bucket_copies: DDP keeps its buckets in addition to the gradients (no gradient_as_bucket_view).
        context: ranks that share each sequence. They shard parameters too.
        context_attention: what these exchange, "gather" (keys and values) or "heads".
    """

    strategy: str = "single"
    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    shards: str = "nothing"
    reshard: bool = True
    reduce_once: bool = False
    auto: tuple[Literal["weights", "gradients"], ...] = ()
    prefetch: int = 1
    cpu_offload: bool = False
    bucket_copies: bool = False
    context: int = 1
    context_attention: Literal["gather", "heads"] = "gather"
    pipeline: PipelineLayout = _NO_PIPELINE

    @property
    def devices(self) -> int:
        return self.stage_ranks * self.pipeline.ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks that share a stage of the pipeline; without one, all."""
        return self.replicate * self.shard * self.context * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        return self.replicate * self.shard

    @property
    def fsdp2(self) -> bool:
        """Whether FSDP2 gathers the weights, or only adds the gradients of replicas."""
        is_mesh = self.strategy not in ("single", "ddp", "zero1", "zero2")
        return self.shards == "parameters" or (is_mesh and self.data_parallel * self.context > 1)

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold different parts of the weights: then each saves its own part by default."""
        split = self.shards == "parameters" or self.tensor_parallel > 1 or self.pipeline.ranks > 1
        return self.devices > self.replicate and split

    @property
    def owners(self) -> tuple[tuple[int, ...], int]:
        """Of the ranks that share Muon's work: (sizes of the dimensions that split a matrix, replicas); no mesh: ((), 1)."""
        if self.strategy in ("single", "ddp", "zero1", "zero2"):
            return (), 1
        return (self.tensor_parallel, self.divisor("parameters")), self.replicate

    def divisor(self, what: str) -> int:
        """Number of ranks that share `what`: "parameters", "gradients" or "optimizer" (state)."""
        order = ("nothing", "optimizer", "gradients", "parameters")
        return self.shard * self.context if order.index(self.shards) >= order.index(what) else 1


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank. `parts` add up to `total`; `moment` names the phase of the step in which the peak occurs.

    Attributes:
        moments: `parts` at the peak of each phase of `steps`, and then of the optimizer step.
        steps: micro-batches that differ in memory, in their order.
        reserved: what CUDA's allocator takes from the device for it. None on a CPU.
        notes: what is unknown or assumed of a custom model, one sentence each.
        is_known: False: activations are not counted.
    """

    parts: dict[str, int]
    moment: str
    moments: tuple[tuple[str, dict[str, int]], ...] = ()
    steps: tuple[Step, ...] = ()
    reserved: int | None = None
    notes: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """Bytes that the device must have: on a GPU, those reserved."""
        return self.total if self.reserved is None else self.reserved


def memory_per_rank(model: GPTConfig, *, layout: Layout | None = None, **settings: Any) -> Memory:
    """Peak memory of training on one rank, by part. With a pipeline: of the rank that needs most.

    Args:
        settings: as `memory_of_ranks` takes them.
    """
    return max(memory_of_ranks(model, layout=layout or Layout(), **settings), key=lambda memory: memory.needed)


def memory_of_ranks(model: GPTConfig, *, layout: Layout, **settings: Any) -> list[Memory]:
    """Peak memory of each rank of the pipeline; without one, of a rank.

    Args:
        settings: sequences per micro-batch, and those of the others of `_of_rank` that differ from its defaults.
    """
    ranks = range(layout.pipeline.ranks)
    stages = [shares(layout.pipeline, model.n_layer, rank) if len(ranks) > 1 else () for rank in ranks]
    return [_of_rank(model, each, layout=layout, **settings) for each in stages]


def _of_rank(
    model: GPTConfig,
    stages: tuple[StageShare, ...],
    *,
    sequences: int,
    length: int | None = None,
    accumulation: int = 1,
    precision: str = "32-true",
    optimizer: Optimizer,
    layout: Layout,
    chunk_size: int | None = None,
    z_loss: bool = False,
    checkpointing: str = "none",
    cuda: bool = True,
    lora: LoRAConfig | None = None,
    compiled: bool = False,
    ema: bool = False,
) -> Memory:
    """Peak memory of a rank.

    Args:
        stages: of the pipeline, that the rank has; (): the whole model.
        sequences: per micro-batch and rank.
        length: tokens of a sequence. None: the block size of the model.
        accumulation: micro-batches per optimizer step.
        precision: a Trainer precision, a key of BYTES.
        chunk_size: tokens whose logits exist at the same time. None: the whole micro-batch.
        checkpointing: "none", "full", "attention", "cheap", or a number k as a string for every k-th block.
        compiled: the blocks are compiled.
        ema: an average of the weights is kept.
    """
    weight_bytes, compute_bytes = BYTES[precision]
    tp, weights = layout.tensor_parallel, weights_of(model, lora, layout.tensor_parallel)
    whole = weights_of(model, lora)
    if stages:
        weights, whole = weights_of_stages(weights, stages), weights_of_stages(whole, stages)
    offload = layout.cpu_offload
    stored = 0 if offload else stored_bytes(weights, weight_bytes) // layout.divisor("parameters")
    state = 0
    if not offload:
        state = int(state_bytes(optimizer, weights, weight_bytes) / layout.divisor("optimizer"))
        state += row_state_bytes(optimizer, whole, weight_bytes)
    gradients = gradient_bytes(weights, weight_bytes, 1 if layout.fsdp2 else tp) // layout.divisor("gradients")
    stays = {"weights": stored, "optimizer state": state}
    if ema and not offload:
        stays["weight average"] = average_bytes(weights) // layout.divisor("parameters")
    if isinstance(model, CustomConfig):
        from lit_llm.plan import custom

        stays["buffers"] = custom.buffer_bytes(model, weight_bytes)
    step = Step(
        model,
        sequences,
        parameter_bytes=weight_bytes,
        compute_bytes=compute_bytes,
        chunk_size=chunk_size,
        z_loss=z_loss,
        checkpointing=checkpointing,
        cuda=cuda,
        tensor_parallel=tp,
        lora=lora,
        length=length,
        shard_gradients=layout.divisor("gradients"),
        context=layout.context,
        gathers_keys=layout.context_attention == "gather",
        pipeline=layout.pipeline if stages else None,
        stages=stages,
        micro_batches=accumulation,
        fsdp=FSDP2(layout.divisor("parameters"), layout.reshard, layout.reduce_once, layout.prefetch) if layout.fsdp2 else None,
        compiled=compiled,
    )
    moments: list[tuple[str, dict[str, int], int]] = []
    steps: tuple[Step, ...]
    # DDP copies all gradients into its buckets.
    copied = layout.bucket_copies and layout.data_parallel > 1 and not layout.fsdp2
    buckets = {"communication buffers": stored_bytes(weights, weight_bytes, trainable=True)} if copied else {}
    if stages:
        steps = (step,)
    elif layout.strategy == "ddp" and not layout.bucket_copies:  # gradients are views of buckets, which stay
        steps = (replace(step, gradients_exist=True),)
    else:
        steps = (step, replace(step, gradients_exist=True))[: 1 if accumulation == 1 else 2]
    for made in map(micro_batch, steps):
        for moment, peak in made.peaks.items():
            unusable = _unusable(made.peaks) if moment == "loss head" else 0
            moments.append((moment, peak | buckets, unusable - made.on_other_streams.get(moment, 0)))
    if optimizer.is_muon:
        dimensions, rows = layout.owners
        work = muon.work_bytes(
            matrix_shapes(whole),
            weight_bytes,
            optimizer.newton_schulz_bytes(cuda=cuda),
            shards=math.prod(dimensions),
            rows=rows,
            cuda=cuda,
            normuon=optimizer.normuon,
        )
    else:
        work = work_bytes(optimizer, weights, weight_bytes, cuda=cuda) // layout.divisor("parameters")
    last = {"gradients": 0 if offload else gradients, "optimizer work": 0 if offload else work}
    moments.append(("optimizer step", last | buckets, 0))
    every = tuple((moment, {name: size for name, size in (stays | adds).items() if size}) for moment, adds, _ in moments)
    moment, parts = max(every, key=lambda m: sum(m[1].values()))
    reserved = None
    if cuda:
        pools = Pools() if layout.divisor("parameters") == 1 else pools_of(weights, layout, weight_bytes, compute_bytes)
        reserved = reserved_bytes(sum(stays.values()), [(adds, more) for _, adds, more in moments], pools)
    return Memory(parts, moment, every, steps, reserved, made.notes, made.is_known)


def _unusable(peaks: dict[str, dict[str, int]]) -> int:
    """What blocks freed in the forward pass, and the loss cannot use: its buffers are larger than theirs."""
    return max(0, peaks["forward"]["activations"] - peaks["loss head"]["activations"])
