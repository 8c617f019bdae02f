"""The forward and backward pass of one micro-batch, from traces of the model.

Blocks of one kind allocate the same, so one of each kind is traced, besides the first and the last. Sizes are linear in the
number of sequences, so two numbers are traced, and any other follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_llm.core.memory import SOFTMAX_NUMEL
from lit_llm.distributed.pipeline_layers import KINDS as SCHEDULES
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.gathering import Bytes, GatheredWeights
from lit_llm.plan.layout import Layout
from lit_llm.plan.pipeline_order import StageShare, weights_of_stages
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.segments import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    LOSS_HEAD,
    Change,
    Operation,
    Run,
    Segment,
    combined,
    extended,
)
from lit_llm.plan.weights import gradient_bytes, reduced_bytes, stored_bytes, weights_of

if TYPE_CHECKING:  # imports torch
    from lit_llm.plan.trace import Body, Numerics

_TRACED_SEQUENCES = (2, 3)
_MOST_BLOCKS = 16
"""Blocks of the loss's softmax beyond which fewer rows are traced."""


@dataclass(frozen=True)
class Step:
    """A micro-batch of one rank: what determines its memory and its work.

    Attributes:
        sequences: of the micro-batch.
        micro_batches: of an optimizer step.
        stages: of the pipeline, that the rank has. (): the whole model.
        cuda: use the kernels of a GPU, not of a CPU.
        gradients_exist: gradients of an earlier micro-batch exist, and this one is accumulated into them.
        alone: count the work only: eager blocks, no pipeline, and weights and gradients that are not sharded.
        timeline: return all operations, not only the peaks.
    """

    settings: RunSettings
    sequences: int
    micro_batches: int = 1
    stages: tuple[StageShare, ...] = ()
    cuda: bool = False
    gradients_exist: bool = False
    alone: bool = False
    timeline: bool = False

    @property
    def shard_gradients(self) -> int:
        """Ranks that share the gradients."""
        return 1 if self.alone else self.settings.layout.divisor("gradients")

    @property
    def pipeline(self) -> PipelineLayout | None:
        """None: the whole model is on this rank."""
        return self.settings.layout.pipeline if self.stages else None

    @property
    def fsdp(self) -> Layout | None:
        """The layout, if FSDP2 holds weights or gradients."""
        return None if self.alone or not self.settings.layout.fsdp2 else self.settings.layout

    @property
    def keeps_gradients(self) -> bool:
        """Whole gradients of earlier micro-batches wait to be reduced."""
        return self.gradients_exist and self.fsdp is not None and self.fsdp.kept.gradients

    @property
    def traced_length(self) -> int:
        """Tokens of a sequence for which the loss is computed here. The model pads them for tensor parallelism itself."""
        return self.settings.sequence_length if self.settings.layout.context == 1 else self.settings.local_length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.sequences * self.settings.local_length

    @property
    def ids_bytes(self) -> int:
        """Bytes of ids and targets of a micro-batch."""
        return 2 * self.sequences * self.settings.sequence_length * 8

    @property
    def narrow_weights(self) -> bool:
        """FSDP2 gathers linear layers in the compute dtype, so autocast makes no copies of them."""
        wide, narrow = self.settings.sizes
        return self.fsdp is not None and narrow < wide

    def numerics(self) -> Numerics:
        from lit_llm.plan.trace import Numerics

        return Numerics(*self.settings.sizes, self.cuda)


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward of one micro-batch, without weights and optimizer state.

    Earlier gradients are included: those being accumulated, or those of the previous step, which Lightning frees only after
    the forward pass.

    Attributes:
        peaks: live bytes by kind at the peak of each phase: "forward"; "loss head", forward and backward, with the
            backward of the last norm; "backward".
        written: all bytes that operations allocate, which is the write traffic to memory.
        matmul_flops, attention_flops: that kernels execute, as torch's FlopCounterMode counts them.
        timeline: of each operation, if they are wanted.
        notes: what is unknown or assumed, one sentence each. Only of a user's module.
        kernels: that write new memory, in a user's module; 0 for a GPT.
        is_known: False: a user's module cannot be traced, so there are only gradients.
        on_other_streams: part of each peak that a GPU allocates on streams that gather and reduce.
    """

    peaks: dict[str, dict[str, int]]
    written: int
    matmul_flops: int
    attention_flops: int
    timeline: tuple[Operation, ...] = ()
    on_other_streams: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_known: bool = True
    kernels: int = 0

    @classmethod
    def of(cls, step: Step, run: Run, **others: Any) -> MicroBatch:
        """What was played."""
        timeline = tuple(run.timeline) if step.timeline else ()
        return cls(run.peaks, run.written, run.flops[0], run.flops[1], timeline, run.on_other_streams, **others)

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


class Passes:
    """What the passes of stages do. `step.gradients_exist`: of an earlier micro-batch."""

    def __init__(self, step: Step) -> None:
        traced, kinds = representatives(_kinds_of_blocks(step))
        body = _body(step, traced)
        self.step, settings, context = step, step.settings, step.settings.layout.context

        def split_gradient(gradient: int) -> tuple[int, int]:
            kept = 0 if step.gradients_exist else gradient // step.shard_gradients
            return kept, 0 if step.fsdp is None or step.keeps_gradients else gradient - kept

        def changes(segments: list[Segment]) -> list[Change]:
            return [Change.of(each, split_gradient, narrow_weights=step.narrow_weights) for each in segments]

        def of_blocks(found: list[Change], more: int) -> list[Change]:
            return [_with_keys(found[i], more, context) for i in kinds]

        other_keys = _gathered_keys(step)
        forward, backward = map(changes, body.passes)
        if step.pipeline is not None:  # the loss's gradient of a tied matrix is on another rank
            [backward[-1]] = changes([[event for event in body.segments[-1] if event[0] != LOSS_HEAD]])
        self.embedding, self.blocks, self.norm = forward[0], of_blocks(forward[1:-1], other_keys), forward[-1]
        self.norm_back, self.embedding_back = backward[0], backward[-1]
        self.blocks_back = of_blocks(backward[-2:0:-1], -other_keys)
        self.head = _head(step, body)
        self.weights = weights_of(settings.model, settings.lora, settings.layout.tensor_parallel)
        if step.pipeline is not None and SCHEDULES[step.pipeline.schedule].splits_backward:
            split = changes(_body(step, traced, split=True).passes[1])
            self.norm_inputs, self.blocks_inputs = split[0], of_blocks(split[-2:0:-1], 0)
            self.head_inputs = _head(step, body, split=True)[1:]

    def gradients(self, stages: Sequence[StageShare]) -> tuple[int, int]:
        """Gradients between two backward passes: their kind, and their bytes."""
        step, own = self.step, weights_of_stages(self.weights, stages)
        if step.keeps_gradients:
            return BUFFERS, reduced_bytes(own)
        split = step.settings.layout.tensor_parallel if step.fsdp is None else 1
        return GRADIENTS, gradient_bytes(own, step.settings.weight_bytes, split) // step.shard_gradients

    def gathered(self, stage: StageShare) -> GatheredWeights:
        step, in_pipeline = self.step, self.step.pipeline is not None
        return GatheredWeights(
            step.fsdp,
            weights_of_stages(self.weights, (stage,)),
            step.settings.sizes,
            already_gathered=in_pipeline or step.gradients_exist,
            last=not in_pipeline and (step.gradients_exist or step.micro_batches == 1),
        )

    def forward_pass(self, run: Run, stage: StageShare) -> None:
        count, gathered = stage.stop - stage.start, self.gathered(stage)
        run.play("forward", [self.embedding] * stage.first, gathered.forward(-1))
        for i, change in enumerate(self.blocks[stage.start : stage.stop]):
            run.play("forward", [change], gathered.forward(i))
        run.play("forward", [self.norm] * stage.last, gathered.forward(count))
        run.play("loss head", self.head[:1] * stage.last, gathered.forward(count))

    def backward_pass(self, run: Run, stage: StageShare) -> None:
        step, count, gathered = self.step, stage.stop - stage.start, self.gathered(stage)
        run.play("loss head", [*self.head[1:], self.norm_back] * stage.last, gathered.backward(count))
        for i, change in reversed(list(enumerate(self.blocks_back[stage.start : stage.stop]))):
            run.play("backward", [change], gathered.backward(i))
            if gathered.sent:
                left = gathered.gradients // step.shard_gradients
                run.compare("backward", run.live, gathered.reduction(i))
                run.live[GRADIENTS] += left if step.keeps_gradients else 0
                freed = gathered.gradients - (0 if step.gradients_exist else left)
                run.live[BUFFERS] -= gathered.sent if step.keeps_gradients else freed
        run.play("backward", [self.embedding_back] * stage.first, gathered.backward(-1))

    def inputs_pass(self, run: Run, stage: StageShare) -> None:
        """The gradients of inputs."""
        gathered, (head, release) = self.gathered(stage), self.head_inputs
        run.play("loss head", [head, self.norm_inputs] * stage.last, gathered.forward(0))
        run.play("backward", self.blocks_inputs[stage.start : stage.stop][::-1] + [release] * stage.last, gathered.forward(0))


def played_as_a_whole(step: Step, phases: Sequence[tuple[str, Segment]]) -> MicroBatch:
    """A micro-batch of a module that was traced as a whole: its phases, and the events of each.

    FSDP2 has the largest block whole all the time, and its gradients all the time of the backward pass.
    """
    settings, weights = step.settings, weights_of(step.settings.model)
    exist = step.gradients_exist
    gathered = GatheredWeights(step.fsdp, weights, settings.sizes, already_gathered=exist, last=exist)
    gradients = gathered.gradients + gathered.root_gradients + gathered.sent
    beside = {
        "forward": gathered.forward(0),
        "loss head": gathered.forward(gathered.blocks),
        "backward": Bytes(gathered.forward(0).own + gradients, gathered.forward(0).sent),
    }
    held = stored_bytes(weights, settings.weight_bytes, trainable=True) // step.shard_gradients
    run = Run()
    run.live[ACTIVATIONS] = step.ids_bytes
    run.live[GRADIENTS] = held
    if step.keeps_gradients:
        run.live[GRADIENTS], run.live[BUFFERS] = 0, reduced_bytes(weights)
    for i, (phase, segment) in enumerate(phases):
        if i == len(phases) // 2 and not exist:  # zero_grad, between forward and backward
            run.live[GRADIENTS] -= held
        change = Change.of(segment, lambda gradient: (0 if exist else gradient // step.shard_gradients, 0))
        run.play(phase, [change], beside[phase])
    return MicroBatch.of(step, run)


# -- parts of a GPT ---------------------------------------------------------------------------------------------------


def _gathered_keys(step: Step) -> int:
    """Bytes of the keys and values of other ranks that a block keeps for its backward pass."""
    settings, layout = step.settings, step.settings.layout
    recomputed = settings.compute.activation_checkpointing in ("full", "attention")
    if layout.context == 1 or layout.context_attention != "gather" or recomputed:
        return 0
    heads = settings.gpt.kv_heads // layout.tensor_parallel
    others = settings.local_length * (layout.context - 1)
    return 2 * step.sequences * others * heads * settings.gpt.resolved_head_dim * settings.sizes[1]


def _with_keys(change: Change, more: int, context: int) -> Change:
    """A block's change with gathered keys, whose attention sees `context` times the traced positions."""
    if context == 1:
        return change
    (matmul, attention), end, peak = change.flops, list(change.end), list(change.peak)
    end[ACTIVATIONS] += more
    peak[ACTIVATIONS] += max(more, 0)
    return replace(change, end=tuple(end), peak=tuple(peak), flops=(matmul, attention * context))


def representatives(kinds: Sequence[Any]) -> tuple[list[int], list[int]]:
    """(layers to trace, for each layer the place in them): the first, the last, and one of each kind in between."""
    last = len(kinds) - 1
    between = {kind: i for i, kind in reversed(list(enumerate(kinds))) if 0 < i < last}
    traced = sorted({0, last, *between.values()})
    return traced, [traced.index(i if i in (0, last) else between[kind]) for i, kind in enumerate(kinds)]


def _kinds_of_blocks(step: Step) -> list[Any]:
    every, model = step.settings.compute.activation_checkpointing, step.settings.gpt
    return [
        (repr(model.layer(i)), isinstance(every, int) and i % every == 0)  # its settings, and whether it is recomputed
        for i in range(model.n_layer)
    ]


def _body(step: Step, layers: list[int], *, split: bool = False) -> Body:
    """The body's trace, from those of two numbers of sequences if these do the same operations. `split`: see `trace_body`."""
    from lit_llm.plan.trace import trace_body

    settings, compute = step.settings, step.settings.compute

    def at(sequences: int) -> Body:
        return trace_body(
            settings.gpt,
            settings.lora,
            layers,
            compute.activation_checkpointing,
            step.numerics(),
            sequences=sequences,
            length=step.traced_length,
            tensor_parallel=settings.layout.tensor_parallel,
            compiled=compute.compile and not step.alone,
            split=split,
        )

    few, more = map(at, _TRACED_SEQUENCES)
    segments = extended(few.segments, more.segments, step.sequences - _TRACED_SEQUENCES[0])
    return at(step.sequences) if segments is None else replace(few, segments=segments)


def _head(step: Step, body: Body, *, split: bool = False) -> list[Change]:
    """Forward and backward of the loss, see `trace_head`. The chunked loss is linear in its rows and in those of a chunk."""
    from lit_llm.plan.built_model import local_config
    from lit_llm.plan.trace import trace_head

    settings, tp = step.settings, step.settings.layout.tensor_parallel
    model = local_config(settings.gpt, tp)
    rows = step.sequences * step.traced_length
    # A split vocabulary always uses the chunked loss, with one chunk if no size is set.
    chunk = settings.chunk_size if tp == 1 else settings.chunk_size or rows
    block = max(1, SOFTMAX_NUMEL // model.padded_vocab_size)  # rows of its softmax

    def at(rows: int, chunk: int | None) -> list[Change]:
        segments = trace_head(
            model,
            step.numerics(),
            rows=rows,
            chunk_size=chunk,
            z_loss=settings.z_loss,
            hidden_dtype=body.hidden_dtype,
            trainable=body.head_is_trainable,
            split=split,
        )
        # A tied matrix is gathered as the embedding needs it.
        narrow = step.narrow_weights and not model.tie_embeddings
        return [Change.of(segment, lambda gradient: (gradient, 0), narrow_weights=narrow) for segment in segments]

    if chunk is None or rows <= _MOST_BLOCKS * block:
        return at(rows, chunk)
    chunk = min(chunk, rows)
    if chunk <= 2 * block:  # many chunks: linear in the whole chunks, besides the rows of the last one
        rest, times = rows % chunk, rows // chunk - 2
        pairs = zip(at(2 * chunk + rest, chunk), at(3 * chunk + rest, chunk), strict=True)
        return [combined((1 - times, few), (times, more)) for few, more in pairs]
    by_rows, by_chunk = (rows / block - 4) / 2, chunk / block - 2
    traced = zip(at(4 * block, 2 * block), at(6 * block, 2 * block), at(6 * block, 3 * block), strict=True)
    return [combined((1 - by_rows, few), (by_rows - by_chunk, more), (by_chunk, wider)) for few, more, wider in traced]
