"""The forward and backward pass of one micro-batch, from traces of the model.

Blocks of one kind allocate the same, so one of each kind is traced, besides the first and the last. Sizes are linear in the
number of sequences, so two numbers are traced, and any other follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_llm.core.memory import SOFTMAX_NUMEL
from lit_llm.distributed.pipeline_layers import KINDS as SCHEDULES
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.layout import Layout
from lit_llm.plan.pipeline_order import StageShare, stages_of_rank, weights_of_stages
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.segments import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    LOSS_HEAD,
    Bytes,
    Change,
    MicroBatch,
    Segment,
    combined,
    extended,
)
from lit_llm.plan.weights import (
    Weights,
    gathered_bytes,
    gathered_groups,
    gradient_bytes,
    is_tied,
    reduced_bytes,
    stored_bytes,
    weights_of,
)

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
        rank: of the pipeline.
        cuda: use the kernels of a GPU, not of a CPU.
        gradients_exist: gradients of an earlier micro-batch exist, and this one is accumulated into them.
    """

    settings: RunSettings
    sequences: int
    micro_batches: int = 1
    rank: int = 0
    cuda: bool = False
    gradients_exist: bool = False

    @property
    def stages(self) -> tuple[StageShare, ...]:
        """Of the pipeline, that the rank has; the whole model without a pipeline."""
        return stages_of_rank(self.settings, self.rank)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """None: the whole model is on this rank."""
        layout = self.settings.layout.pipeline
        return layout if layout.ranks > 1 else None

    @property
    def shard_gradients(self) -> int:
        """Ranks that share the gradients."""
        return self.settings.layout.divisor("gradients")

    @property
    def fsdp(self) -> Layout | None:
        """The layout, if FSDP2 holds weights or gradients."""
        return self.settings.layout if self.settings.layout.fsdp2 else None

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


class GatheredWeights:
    """Bytes that FSDP2 holds of a stage in each part of a micro-batch; without FSDP2 none.

    As `lit_llm.distributed.fsdp` sets it up, after torch 2.13's `_fsdp_param_group.py`:

    - A gather fills a buffer, from which the whole weights are copied. In the forward pass the buffer lives until the next
      copy, behind the last block through the loss. In the backward pass it is freed after the copy.
    - The root (norm and head, or a tied embedding) stays whole from its first use to the end of the backward pass, and so do
      its gradients. The embedding is not gathered again for the backward pass.
    - Behind the backward pass of a block, its gradients are copied into a buffer, which lives until the next block's.

    Parts of the stage are -1 for the embedding, 0 to L - 1 for its blocks, and L for norm, head and loss.

    Attributes:
        blocks: number of blocks of the stage.
        gradients: bytes of the largest block's gradients.
        root_gradients: bytes of the gradients of norm and head.
        sent: bytes of the buffer from which a block's gradients are reduced, in fp32. 0: not behind this micro-batch.
        already: the weights were gathered by an earlier micro-batch, and kept.

    Args:
        weights: parameters of the stage.
        last: this micro-batch frees kept weights, and reduces kept gradients.
    """

    def __init__(self, step: Step, weights: Weights, *, already_gathered: bool, last: bool) -> None:
        layout, sizes = step.fsdp, step.settings.sizes
        self.keeps, keeps_gradients = (True, False) if layout is None else layout.kept
        self.already = already_gathered and self.keeps
        self.prefetch = 0 if layout is None else layout.prefetch
        self.frees, reduces = last or not self.keeps, last or not keeps_gradients
        weights = () if layout is None else weights
        block, root, embedding, self.blocks = gathered_groups(weights, tied=is_tied(weights))
        self.gradients = stored_bytes(block, sizes[0], trainable=True)
        self.root_gradients = stored_bytes(tuple(w for w in root if w.part != "token embedding"), sizes[0], trainable=True)
        self.sent = reduced_bytes(block) if reduces else 0
        self._block, self._embedding, self._root = (sum(gathered_bytes(part, *sizes)) for part in (block, embedding, root))
        self._inside = gathered_bytes(weights, *sizes)[0]
        is_buffered = layout is not None and layout.divisor("parameters") > 1  # one rank needs no buffers
        self._block_buffer, self._first_buffer = (self._block, self._embedding or self._root) if is_buffered else (0, 0)

    def forward(self, part: int) -> Bytes:
        if self.already:
            return Bytes(self._kept(self.blocks))
        held = self._kept(part) if self.keeps else self._root
        if part < 0:
            return Bytes(held + self._embedding, self._first_buffer)
        if part == self.blocks:
            return Bytes(held, self._block_buffer)
        ahead = min(self.prefetch, self.blocks - 1 - part)
        return Bytes(held + self._block, (1 + ahead) * self._block_buffer)

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
        """Behind the backward pass of a block, when its gradients are sent and those of the block behind it have arrived."""
        own, sent = self.backward(block)
        return Bytes(own - (self._block if self.frees else 0), sent + (0 if block < self.blocks - 1 else self.sent))

    def _kept(self, blocks: int) -> int:
        """The whole weights of the stage with this many blocks. -1: the root's only."""
        held = min(max(blocks, 0), self.blocks) * self._inside // self.blocks
        return self._root + (self._embedding if blocks >= 0 else 0) + held


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
            step,
            weights_of_stages(self.weights, (stage,)),
            already_gathered=in_pipeline or step.gradients_exist,
            last=not in_pipeline and (step.gradients_exist or step.micro_batches == 1),
        )

    def forward_pass(self, run: MicroBatch, stage: StageShare) -> None:
        count, gathered = stage.stop - stage.start, self.gathered(stage)
        run.play("forward", [self.embedding] * stage.first, gathered.forward(-1))
        for i, change in enumerate(self.blocks[stage.start : stage.stop]):
            run.play("forward", [change], gathered.forward(i))
        run.play("forward", [self.norm] * stage.last, gathered.forward(count))
        run.play("loss head", self.head[:1] * stage.last, gathered.forward(count))

    def backward_pass(self, run: MicroBatch, stage: StageShare) -> None:
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

    def inputs_pass(self, run: MicroBatch, stage: StageShare) -> None:
        """The gradients of inputs."""
        gathered, (head, release) = self.gathered(stage), self.head_inputs
        run.play("loss head", [head, self.norm_inputs] * stage.last, gathered.forward(0))
        run.play("backward", self.blocks_inputs[stage.start : stage.stop][::-1] + [release] * stage.last, gathered.forward(0))


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
            compiled=compute.compile,
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
