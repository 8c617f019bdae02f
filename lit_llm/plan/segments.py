"""A micro-batch as segments (such as a block's forward pass): events of a segment, their sums, and the segments in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.weights import Weights, gathered_bytes, gathered_groups, is_tied, reduced_bytes, stored_bytes

KINDS = ("activations", "loss head", "gradients", "weight copies", "communication buffers")
ACTIVATIONS, LOSS_HEAD, GRADIENTS, WEIGHT_COPIES, BUFFERS, MATMUL, ATTENTION, WRITTEN, KERNELS = range(9)
"""Kinds of events: first live bytes of each of `KINDS`, then counts. GRADIENTS are bytes of parameters' gradients. MATMUL and
ATTENTION are FLOPs. WRITTEN and KERNELS are bytes and number of allocations. Traces have no BUFFERS, WRITTEN and KERNELS."""
TRAFFIC = tuple(
    (group, kind) for group in ("tensor", "context", "expert") for kind in ("all_gather", "all_reduce", "all_to_all")
)
"""Pairs (group of ranks, collective). Each pair has two more kinds of events, numbered from KERNELS + 1 on: bytes of the whole
tensor, and number of calls."""
N_COUNTS = 4 + 2 * len(TRAFFIC)

Event = tuple[int, int]
"""(kind, amount): amounts are bytes, positive for allocations and negative for releases, or counts."""
Segment = list[Event]


def extended(first: Sequence[Segment], second: Sequence[Segment], times: float) -> list[Segment] | None:
    """Return `first` + `times` · (`second` - `first`) for the amount of each event; None if the traces' events do not match."""
    if [[kind for kind, _ in segment] for segment in first] != [[kind for kind, _ in segment] for segment in second]:
        return None
    return [
        [(kind, round(a + times * (b - a))) for (kind, a), (_, b) in zip(one, two, strict=True)]
        for one, two in zip(first, second, strict=True)
    ]


@dataclass(frozen=True)
class Change:
    """Record of the sums of a segment's events. `end`, `peak`: live bytes of each of KINDS (activations, …) at the segment's
    end and at its peak, less the live bytes at its start. `counts`: sums of other events, from MATMUL on (FLOPs, traffic)."""

    end: tuple[int, ...]
    peak: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, segment: Segment, split_gradient: Callable[[int], tuple[int, int]], *, narrow_weights: bool = False) -> Change:
        """Return the sums of the events of a segment.

        Args:
            split_gradient: function from a gradient's bytes to (bytes that stay, bytes that are freed after the reduction).
            narrow_weights: leave out the events of copies of weights (`Step.narrow_weights`).
        """
        live, total, most, counts = [0] * len(KINDS), 0, 0, [0] * N_COUNTS
        peak = tuple(live)
        for kind, amount in segment:
            if kind >= len(KINDS):
                counts[kind - len(KINDS)] += amount
                continue
            if narrow_weights and kind == WEIGHT_COPIES:
                continue
            if kind == GRADIENTS:
                amount, passing = split_gradient(amount)
                live[BUFFERS] += passing
                total += passing
            elif amount > 0:
                counts[WRITTEN - len(KINDS)] += amount
                counts[KERNELS - len(KINDS)] += 1
            live[kind] += amount
            total += amount
            if total > most:
                most, peak = total, tuple(live)
        return cls(tuple(live), peak, tuple(counts))


def combined(*terms: tuple[float, Change]) -> Change:
    """Return the sum of factor · change over the pairs (factor, change)."""
    rows = [[factor * number for number in (*c.end, *c.peak, *c.counts)] for factor, c in terms]
    n, sums = len(KINDS), [round(sum(column)) for column in zip(*rows, strict=True)]
    return Change(tuple(sums[:n]), tuple(sums[n : 2 * n]), tuple(sums[2 * n :]))


class Bytes(NamedTuple):
    """Record of FSDP2's bytes of weights and buffers: `own` on the computing stream, `sent` on communication streams."""

    own: int
    sent: int = 0


class Operation(NamedTuple):
    """Record of a forward or backward pass of a block, embedding, last norm or loss. `live`: {kind: bytes at the peak}."""

    phase: str
    live: dict[str, int]
    flops: int


@dataclass
class MicroBatch:
    """Collector of memory and FLOPs of a micro-batch's forward and backward, without weights and optimizer state. `play`
    adds the changes of one segment after the other. Gradients from before the micro-batch are included: gradients of earlier
    micro-batches, or of the previous step, which Lightning frees only after the forward pass.

    Attributes:
        peaks: {phase: {kind: live bytes at the phase's peak}} for the phases "forward", "backward" and "loss head" (forward
            and backward of the loss, and backward of the last norm).
        on_other_streams: {phase: bytes of the peak that a GPU allocates on the streams that gather and reduce}.
        live: live bytes of each of KINDS after the changes that `play` has added.
        counts: FLOPs of matrix products and of attention that kernels execute, as torch's FlopCounterMode counts them; bytes
            that operations allocate (the write traffic); number of kernels that allocate; bytes and calls of each TRAFFIC.
        timeline: an entry for each change that `play` has added.
        notes: sentences about what is unknown or assumed.
        is_known: False if a user's module cannot be traced, so that only gradients are counted.
    """

    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    on_other_streams: dict[str, int] = field(default_factory=dict)
    live: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    counts: list[int] = field(default_factory=lambda: [0] * N_COUNTS)
    timeline: list[Operation] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def flops(self) -> int:
        return sum(self.counts[:2])

    def play(self, phase: str, change: Change, gathered: Bytes) -> None:
        """Add a segment's change to this micro-batch. `gathered`: bytes of FSDP2's buffers during the segment."""
        self.compare(phase, added(self.live, change.peak), gathered, sum(change.counts[:2]))
        self.live = added(self.live, change.end)
        self.counts = added(self.counts, change.counts)

    def compare(self, phase: str, live: Sequence[int], gathered: Bytes, flops: int = 0) -> None:
        """Add an operation with the bytes `live` and `gathered` to the timeline. The largest of a phase is the phase's peak."""
        by_kind = dict(zip(KINDS, live, strict=True))
        by_kind[KINDS[BUFFERS]] += sum(gathered)
        self.timeline.append(Operation(phase, by_kind, flops))
        if phase not in self.peaks or sum(by_kind.values()) > sum(self.peaks[phase].values()):
            self.peaks[phase], self.on_other_streams[phase] = by_kind, gathered.sent


def added(one: Sequence[int], other: Sequence[int], sign: int = 1) -> list[int]:
    """Return the elementwise sum of two lists of numbers; with `sign` -1, the elementwise difference."""
    return [a + sign * b for a, b in zip(one, other, strict=True)]


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Record of a micro-batch of one rank, with all settings that determine its memory and FLOPs.

    Attributes:
        sequences: number of sequences in the micro-batch.
        micro_batches: number of micro-batches in an optimizer step.
        rank: the rank in the pipeline.
        cuda: whether the micro-batch runs on a GPU, not on a CPU.
        gradients_exist: whether gradients of an earlier micro-batch of the same step exist, to which this micro-batch adds.
    """

    settings: PlannedRun
    sequences: int
    micro_batches: int = 1
    rank: int = 0
    cuda: bool = False
    gradients_exist: bool = False

    def traced(self, sequences: int) -> Step:
        """Return a step with `sequences` sequences and only the settings on which a trace depends, so that runs which differ
        in other settings share a trace."""
        run, layout = self.settings, self.settings.layout
        names = ("tensor_parallel", "expert", "context", "context_attention")
        local = Layout(**{name: getattr(layout, name) for name in names})
        loss = replace(run.loss, chunk_size=None)  # the loss is traced apart
        kept = {name: getattr(run, name) for name in ("precision", "compute", "loss_head", "lora", "block_size")}
        return Step(PlannedRun(run.model, Optimizer("SGD"), 1, 1, layout=local, loss=loss, **kept), sequences, cuda=self.cuda)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """The layout of the pipeline. None: there is no pipeline."""
        layout = self.settings.layout.pipeline
        return layout if layout.ranks > 1 else None

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients and optimizer state are in host memory, and activations on a GPU."""
        return self.settings.offloads(cuda=self.cuda)

    def own_part(self, gradients: int) -> int:
        """Return the bytes of gradients that stay on this device after the reduction of `gradients` bytes of gradients."""
        return 0 if self.offloads else gradients // self.settings.layout.divisor("gradients")

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 shards weights or gradients."""
        return self.settings.layout.fsdp2 or self.settings.experts_apart

    @property
    def keeps_gradients(self) -> bool:
        """Whether FSDP2 stores whole gradients of earlier micro-batches, and reduces them after the last micro-batch."""
        return self.gradients_exist and self.fsdp and self.settings.layout.kept.gradients

    def gradients(self, weights: Weights) -> tuple[int, int]:
        """Return (kind of event, bytes) of the gradients of `weights` from an earlier micro-batch or step on this device."""
        if self.keeps_gradients:
            return BUFFERS, reduced_bytes(weights)
        return GRADIENTS, self.own_part(stored_bytes(weights, self.settings.weight_bytes, trainable=True))

    @property
    def ids_bytes(self) -> int:
        """Bytes of the int64 token ids and targets of a micro-batch."""
        return 2 * self.sequences * self.settings.sequence_length * 8

    @property
    def narrow_weights(self) -> bool:
        """Whether FSDP2 gathers linear layers in the compute dtype, so that autocast makes no copies of them."""
        wide, narrow = self.settings.sizes
        return self.fsdp and narrow < wide


class GatheredWeights:
    """Calculator of the bytes that FSDP2's gathered weights and buffers take in each part of a stage; 0 without FSDP2.

    FSDP2, as `lit_llm.distributed.fsdp` sets it up, follows torch 2.13's `_fsdp_param_group.py`:

    - A gather fills a buffer, from which the whole weights are copied. In the forward pass the buffer lives until the next
      gather's copy; after the last block, it lives through the loss. In the backward pass it is freed after the copy.
    - The root (norm and head, or a tied embedding) and its gradients stay whole from their first use to the end of the backward
      pass. The embedding is not gathered again for the backward pass.
    - After the backward pass of a block, its gradients are copied into a buffer, which lives until the next block's copy.

    The parts of a stage of L blocks are numbered: -1 is the embedding, 0 to L - 1 the blocks, L norm, head and loss.

    Attributes:
        blocks: number of blocks of the stage.
        gradients: bytes of the largest block's gradients.
        shared_gradients: the bytes of the largest block's gradients that a rank keeps after the reduction, times the number of
            ranks that shard weights. More than `gradients` if fewer ranks share the experts.
        root_gradients: bytes of the gradients of norm and head.
        sent: bytes of the fp32 buffer from which a block's gradients are reduced. 0: this micro-batch reduces no gradients.
        keeps: whether weights stay gathered from their first use to the last micro-batch of the step.
        already: whether an earlier micro-batch has gathered weights that stay gathered.
        frees: whether this micro-batch frees gathered weights: always without `keeps`, else the last micro-batch only.

    Args:
        weights: parameters of the stage.
    """

    def __init__(self, step: Step, weights: Weights) -> None:
        layout, sizes, exist, in_pipeline = step.settings.layout, step.settings.sizes, step.gradients_exist, step.pipeline
        self.keeps, keeps_gradients = layout.kept
        self.already, self.prefetch = (exist or in_pipeline is not None) and self.keeps, layout.prefetch
        last = in_pipeline is None and (exist or step.micro_batches == 1)
        self.frees, reduces = last or not self.keeps, last or not keeps_gradients
        weights = weights if step.fsdp else ()
        block, root, embedding, self.blocks = gathered_groups(weights, tied=is_tied(weights))
        self.gradients = sum(w.total * w.itemsize(sizes[0]) for w in block if w.group is not None)
        self.shared_gradients = stored_bytes(block, sizes[0], trainable=True)
        self.root_gradients = stored_bytes(tuple(w for w in root if w.part != "token embedding"), sizes[0], trainable=True)
        self.sent = reduced_bytes(block) if reduces else 0
        self._block, self._embedding, self._root = (sum(gathered_bytes(part, *sizes)) for part in (block, embedding, root))
        self._inside = gathered_bytes(weights, *sizes)[0]
        ranks = layout.divisor("parameters")
        buffered = tuple(w for w in block if (step.settings.holders(ranks) if w.experts else ranks) > 1)  # one rank needs none
        self._block_buffer = sum(gathered_bytes(buffered, *sizes))
        self._first_buffer = (self._embedding or self._root) if ranks > 1 else 0

    def forward(self, part: int) -> Bytes:
        if self.already:
            return Bytes(self._kept(self.blocks))
        whole = self._kept(part) if self.keeps else self._root
        if part < 0:
            return Bytes(whole + self._embedding, self._first_buffer)
        if part == self.blocks:
            return Bytes(whole, self._block_buffer)
        ahead = min(self.prefetch, self.blocks - 1 - part)
        return Bytes(whole + self._block, (1 + ahead) * self._block_buffer)

    def backward(self, part: int) -> Bytes:
        sent = self.sent if part < self.blocks - 1 else 0
        if self.keeps:
            return Bytes(self._kept(part + 1 if self.frees else self.blocks), sent)
        if part < 0:
            return Bytes(self._root, sent)
        if part == self.blocks:
            return Bytes(self._root, self._block_buffer)
        return Bytes(self._root + self._block, min(self.prefetch, part) * self._block_buffer + sent)

    def reduction(self, block: int) -> Bytes:
        """Return FSDP2's bytes after the backward pass of block `block`, while the block's gradients are copied into the buffer
        for the reduction, and the weights of the next block are already gathered."""
        own, sent = self.backward(block)
        return Bytes(own - (self._block if self.frees else 0), sent + (0 if block < self.blocks - 1 else self.sent))

    def _kept(self, blocks: int) -> int:
        """Return the bytes of the gathered weights of the root, the embedding and `blocks` blocks. -1: of the root only."""
        inside = min(max(blocks, 0), self.blocks) * self._inside // self.blocks
        return self._root + (self._embedding if blocks >= 0 else 0) + inside
