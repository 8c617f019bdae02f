"""Memory per rank: what stays, what a step adds, at which moment it is most, and what fits.

GB are 1e9 bytes; GiB 2^30.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lit_llm.plan.activations import Step, micro_batch
from lit_llm.plan.optimizer import Optimizer, state_bytes, work_bytes
from lit_llm.plan.parameters import ModelShape, block_parameters, local_parameters

BYTES = {  # Trainer precision -> bytes of a weight, of an operand of a matrix product
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
}
RESERVED_GB = 1.0
"""Of a GPU: its context, libraries' workspaces and fragmentation. An assumption."""


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: replicate · shard · tensor_parallel of them.

    Attributes:
        shards: what ranks of a shard group split: "nothing", "optimizer" (ZeRO-1), "gradients" (ZeRO-2, and the optimizer), or
            "parameters" (ZeRO-3, FSDP: and all of these).
        reshard: gathered weights are given back between forward and backward.
        prefetch: blocks whose weights are gathered ahead.
        bucket_copies: DDP's buckets are beside the gradients, not the gradients themselves.
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
        """Ranks that "parameters", "gradients" or "optimizer" state is split over."""
        order = ("nothing", "optimizer", "gradients", "parameters")
        return self.shard if order.index(self.shards) >= order.index(what) else 1


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank. `parts` adds up to `total`; `moment` says when that is."""

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
    """Peak memory of training on one rank, with what it is made of.

    Args:
        sequences: per micro-batch and rank.
        accumulation: micro-batches per optimizer step.
        precision: a Trainer precision, a key of BYTES.
        chunk_size: tokens whose logits exist at a time; None: all of the micro-batch.
        checkpointing: "none", "full", "attention", "cheap" or k as text: every k-th block.
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
    """DDP: one bucketed copy of the gradients, always. FSDP2: what is gathered at a moment, and whole gradients on their way.

    FSDP2 holds the last norm and the head (tied: the embedding) from their use to the end of the backward pass, and their whole
    gradients; beside them the block at work, the prefetched ones and the buffer the next arrives in; a block's gradients leave
    whole, and are copied to be sent.
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


def zero_bytes_per_rank(
    parameters: float, ranks: int, shards: str, *, weights: int = 4, gradients: int = 4, state: int = 8
) -> float:
    """Bytes of weights, gradients and optimizer state on each rank, without activations (Rajbhandari et al. 2020, figure 1).

    With AdamW in fp32, or in mixed precision with fp32 masters, the three make 16 bytes a parameter.
    """
    layout = Layout(shard=ranks, shards=shards)
    return parameters * (
        weights / layout.divisor("parameters") + gradients / layout.divisor("gradients") + state / layout.divisor("optimizer")
    )


def naive_activation_values(layers: int, sequences: int, length: int, width: int, heads: int, vocab_size: int) -> int:
    """Values that a transformer with unfused attention holds: L·(16·BTd + 2·B·H·T²) + BTd + BTV (the textbook's estimate)."""
    block = 16 * sequences * length * width + 2 * sequences * heads * length**2
    return layers * block + sequences * length * (width + vocab_size)


def flash_activation_bytes(tokens: int, width: int, hidden_width: int) -> float:
    """Bytes per layer in bf16 with a fused attention kernel: n·d·(18 + 4·f/d), 34·n·d for f = 4d (Korthikanti et al. 2022)."""
    return tokens * width * (18 + 4 * hidden_width / width)


def sequences_that_fit(capacity_bytes: float, fixed_bytes: float, bytes_per_sequence: float) -> int:
    """Whole sequences beside what does not depend on them."""
    return max(0, int((capacity_bytes - fixed_bytes) // bytes_per_sequence))
