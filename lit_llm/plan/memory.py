"""Peak memory per rank: weights and optimizer state, plus what a training step adds at its peak. GB = 1e9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lit_llm.plan.activations import Step, micro_batch
from lit_llm.plan.optimizer import Optimizer, state_bytes, work_bytes
from lit_llm.plan.parameters import ModelShape, block_parameters, local_parameters

BYTES = {  # Trainer precision -> bytes per weight, bytes per operand of a matrix product
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
}
RESERVED_GB = 1.0
"""GPU memory taken by the driver context, library workspaces and fragmentation. An assumption."""


@dataclass(frozen=True)
class Layout:
    """The parallel layout: replicate · shard · tensor_parallel ranks.

    Attributes:
        shards: what the ranks of a shard group split: "nothing", "optimizer" (ZeRO-1), "gradients" (ZeRO-2: gradients and
            optimizer state), or "parameters" (ZeRO-3 and FSDP: all three).
        reshard: gathered weights are freed between forward and backward.
        prefetch: number of blocks whose weights are gathered ahead.
        bucket_copies: DDP keeps its buckets in addition to the gradients (no gradient_as_bucket_view).
    """

    strategy: str = "single"
    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    shards: str = "nothing"
    reshard: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    bucket_copies: bool = False

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        return self.replicate * self.shard

    def divisor(self, what: str) -> int:
        """Number of ranks that share `what`: "parameters", "gradients" or "optimizer" (state)."""
        order = ("nothing", "optimizer", "gradients", "parameters")
        return self.shard if order.index(self.shards) >= order.index(what) else 1


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank. `parts` add up to `total`; `moment` names the phase of the step in which the peak occurs."""

    parts: dict[str, int]
    moment: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_per_rank(
    model: ModelShape,
    *,
    sequences: int,
    accumulation: int = 1,
    precision: str = "32-true",
    optimizer: Optimizer,
    layout: Layout | None = None,
    chunk_size: int | None = None,
    z_loss: bool = False,
    checkpointing: str = "none",
    cuda: bool = True,
) -> Memory:
    """Peak memory of training on one rank, by part.

    Args:
        sequences: per micro-batch and rank.
        accumulation: micro-batches per optimizer step.
        precision: a Trainer precision, a key of BYTES.
        chunk_size: tokens whose logits exist at the same time. None: the whole micro-batch.
        checkpointing: "none", "full", "attention", "cheap", or a number k as a string for every k-th block.
    """
    layout = layout or Layout()
    weight_bytes, compute_bytes = BYTES[precision]
    local = local_parameters(model, layout.tensor_parallel)
    offload = layout.cpu_offload
    weights = 0 if offload else local * weight_bytes // layout.divisor("parameters")
    state = state_bytes(optimizer, model, weight_bytes) * local / local_parameters(model, 1) / layout.divisor("optimizer")
    state = 0 if offload else int(state)
    gradients = local * weight_bytes // layout.divisor("gradients")
    stays = {"weights": weights, "optimizer state": state}
    step = Step(
        model,
        sequences,
        parameter_bytes=weight_bytes,
        compute_bytes=compute_bytes,
        chunk_size=chunk_size,
        z_loss=z_loss,
        checkpointing=checkpointing,
        cuda=cuda,
        tensor_parallel=layout.tensor_parallel,
        shard_gradients=layout.divisor("gradients"),
    )
    moments: list[tuple[str, dict[str, int]]] = []
    for exist in (False, True)[: 1 if accumulation == 1 else 2]:
        made = micro_batch(replace(step, gradients_exist=exist))
        for moment, peak in made.peaks.items():
            at_peak = dict(peak)
            at_peak["activations"] += at_peak.pop("work")
            moments.append((moment, at_peak | {"communication buffers": _buffers(model, layout, weight_bytes, moment)}))
    work = work_bytes(optimizer, model, weight_bytes, cuda=cuda)
    work = work // (layout.divisor("parameters") * layout.tensor_parallel)
    last = {"gradients": 0 if offload else gradients, "optimizer work": 0 if offload else work}
    moments.append(
        ("optimizer step", last | {"communication buffers": _buffers(model, layout, weight_bytes, "optimizer step")})
    )
    moment, adds = max(moments, key=lambda m: sum(m[1].values()))
    return Memory({name: size for name, size in (stays | adds).items() if size}, moment.partition(",")[0])


def _buffers(model: ModelShape, layout: Layout, weight_bytes: int, moment: str) -> int:
    """Bytes of communication buffers in one phase of the step.

    DDP: one bucketed copy of the gradients, throughout. FSDP2: unsharded weights and gradients. The root group (last norm and
    head, or the tied embedding) stays unsharded from its first use to the end of the backward pass, with its gradients.
    Blocks in memory: the current one, the prefetched ones, and one receive buffer. In the backward pass, add the unsharded
    gradients of one block and the copy that is sent.
    """
    local = local_parameters(model, layout.tensor_parallel)
    if layout.shards != "parameters" or layout.shard == 1:
        return local * weight_bytes if layout.bucket_copies and layout.data_parallel > 1 else 0
    if moment == "optimizer step":
        return 0
    block = block_parameters(model) // layout.tensor_parallel
    outside = local - block * model.n_layer
    root = outside if model.tie_embeddings else outside // 2
    blocks = (2 + layout.prefetch) * block if layout.reshard else block * model.n_layer
    if moment.startswith("loss head"):
        return (root if layout.reshard else local) * weight_bytes
    if moment.startswith("forward"):
        return (root + blocks) * weight_bytes
    return (2 * root + blocks + 2 * block) * weight_bytes
