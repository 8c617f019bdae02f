"""The memory and FLOPs of a micro-batch of a whole model, or of a pipeline rank's stages over an optimizer step.

For a pipeline rank, this file adds up the traces of the rank's actions (forward or backward of a stage) in torch's order. The
trace of an action releases the stage's output and input and their gradients when no operation needs the tensor any more. In a
real step, some of these tensors stay longer:

- A stage has a buffer for each input and for each gradient of an output. Between two stages of one rank nothing is copied: the
  result of one stage takes the place of the other stage's buffer.
- With several stages on a rank, torch waits for messages only at the end of the step, and gloo keeps the sent tensors until
  then. NCCL releases a tensor after sending it.
- If the gradient of an input is computed before the gradients of weights, both input and gradient stay until the step ends.

Blocks of one kind allocate equally much, so only the first block, the last block and one block of each kind in between are
traced. Sizes are linear in the number of sequences, so traces of 2 and 3 sequences give the sizes for any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lit_llm.core.memory import SOFTMAX_NUMEL
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallel_layout import NO_PIPELINE
from lit_llm.distributed.pipeline_layers import KINDS as SCHEDULES
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_order import StageShare, Task, micro_batches_to_play, orders
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.segments import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    KINDS,
    LOSS_HEAD,
    Bytes,
    Change,
    GatheredWeights,
    MicroBatch,
    Segment,
    Step,
    added,
    combined,
    extended,
)
from lit_llm.plan.weights import OwnModel, average_bytes, cached_by_text, gathered_groups, reduced_bytes, weights_of_stages

if TYPE_CHECKING:  # imports torch
    from lit_llm.plan.trace import Body

_TRACED_SEQUENCES = (2, 3)
_MOST_BLOCKS = 16
"""The most softmax blocks of the loss (each of SOFTMAX_NUMEL logits) that are traced; more are extrapolated from fewer."""
_RECOMPUTED = (
    "recomputation with schedule {}: torch recomputes a block for each of its weights, which may take twice the memory that is "
    "planned"
)


@cached_by_text
def micro_batch(step: Step) -> MicroBatch:
    """Return memory and FLOPs of one micro-batch; with a pipeline, the memory of a rank's whole optimizer step. The first call
    for a model takes tenths of a second."""
    if isinstance(step.settings.model, OwnModel):
        from lit_llm.plan.own_trace import micro_batch_of_own  # imports torch

        return micro_batch_of_own(step)
    return _of_stages(step) if step.pipeline is None else _of_pipeline(step, step.pipeline)


def one_micro_batch(settings: PlannedRun, *, cuda: bool) -> MicroBatch:
    """Return the work of one micro-batch through all blocks, as eager code without FSDP2 or a pipeline: FLOPs, and bytes that
    operations write."""
    layout = replace(settings.layout, strategy="single", pipeline=NO_PIPELINE)
    alone = replace(settings, layout=layout, compute=replace(settings.compute, compile=False))
    return micro_batch(Step(alone, settings.sequences, cuda=cuda))


@cached_by_text
def stages_work(settings: PlannedRun, rank: int, *, cuda: bool) -> MicroBatch:
    """Return the work (`counts`) of one micro-batch through the stages of pipeline rank `rank`. With several stages, use only
    `counts`: the memory of a pipeline step is larger, because several micro-batches are in flight."""
    return _of_stages(Step(settings, settings.sequences, rank=rank, cuda=cuda))


def _of_stages(step: Step) -> MicroBatch:
    passes, batch, stages = Passes(step), MicroBatch(), step.settings.pipeline_stages(step.rank)
    kind, earlier = step.gradients(passes.weights)
    batch.live[ACTIVATIONS], batch.live[kind] = step.ids_bytes, earlier
    for stage in stages:
        passes.forward_pass(batch, stage)
    if not step.gradients_exist:  # zero_grad, between forward and backward
        batch.live[GRADIENTS] -= earlier
    for stage in stages:
        passes.backward_pass(batch, stage)
        if step.settings.reference_pass:
            passes.reference_pass(batch, stage)
    return batch


def _of_pipeline(step: Step, layout: PipelineLayout) -> MicroBatch:
    """Return the memory of a pipeline rank in an optimizer step. A step of many micro-batches repeats its middle part, so only
    some micro-batches are simulated."""
    settings = step.settings
    stages = {stage.number: stage for stage in settings.pipeline_stages(step.rank)}
    count = micro_batches_to_play(layout, step.micro_batches)
    order = [task for group in orders(layout, count)[step.rank] for task in group]
    order = [task for task in order if not (task.kind == "gradients of inputs" and stages[task.stage].first)]  # nothing to do
    split = {task[1:] for task in order if task.kind == "gradients of inputs"}
    passes = [Passes(replace(step, gradients_exist=exist)) for exist in (False, True)]
    tokens = step.sequences * settings.local_length // settings.layout.tensor_parallel
    moved = tokens * settings.gpt.n_embd * settings.weight_bytes
    whole = {}  # stage -> bytes of weights that FSDP2 keeps gathered for the whole step
    for number, stage in stages.items():
        gathered = passes[1].gathered(stage)
        whole[number] = gathered.forward(0).own if gathered.already else 0

    def buffers_after(task: Task) -> int:
        """Return how many buffers of a stage's input, output or their gradients live after `task`, less those in its trace."""
        stage = stages[task.stage]
        before_is_here, next_is_here = (task.stage + i in stages for i in (-1, 1))
        if task.kind == "forward":
            return -next_is_here
        if task.kind == "gradients of inputs":
            return -before_is_here
        kept_by_gloo = len(stages) > 1 and not step.cuda
        output = not stage.last and (next_is_here or kept_by_gloo)
        gradient = not stage.first and (task[1:] in split or (kept_by_gloo and not before_is_here))
        return output + gradient

    @cache
    def played(kind: str, number: int, exist: bool) -> MicroBatch:
        """Return memory and FLOPs of the action `kind` of stage `number`. `exist`: an earlier micro-batch left gradients."""
        run, stage = MicroBatch(), stages[number]
        if kind == "forward":
            passes[exist].forward_pass(run, stage)
        elif kind == "gradients of inputs":
            passes[exist].inputs_pass(run, stage)
        else:
            received = 0 if stage.last else moved  # the output's gradient, which the trace releases
            run.live[ACTIVATIONS] += received
            passes[exist].backward_pass(run, stage)
            run.live[ACTIVATIONS] -= received
            if stage.last:  # also a tied matrix's gradient, which the trace adds to the embedding's
                run.live[LOSS_HEAD] = -played("forward", number, exist).live[LOSS_HEAD]
            if settings.gpt.predict_ahead and (stage.first or stage.last):  # both stages have a gradient of the embedding
                run.live[ACTIVATIONS] = -played("forward", number, exist).live[ACTIVATIONS]
        if kind == "gradients of weights":  # releases all tensors that forward and "gradients of inputs" saved
            run.live = added(run.live, played("gradients of inputs", number, exist).live, -1)
            run.peaks = {"backward": {name: max(0, size) for name, size in zip(KINDS, run.live, strict=True)}}
            run.on_other_streams = {"backward": 0}
        return run

    batch, done = MicroBatch(), set[int]()
    batch.live[ACTIVATIONS] = step.micro_batches * step.ids_bytes
    batch.live[ACTIVATIONS] += step.micro_batches * moved * sum((not s.first) + (not s.last) for s in stages.values())
    of_one = sum(buffers_after(task) for task in order if task.micro_batch == 0)
    batch.live[ACTIVATIONS] += (step.micro_batches - count) * moved * of_one
    for task in order:
        kind = "backward" if task.kind == "gradients of weights" and task[1:] not in split else task.kind
        action = played(kind, task.stage, task.stage in done)
        others = sum(whole.values()) - whole[task.stage]
        for phase, peak in action.peaks.items():
            sent = action.on_other_streams[phase]  # a part of `peak`
            batch.compare(phase, added(batch.live, [*peak.values()]), Bytes(others - sent, sent), action.flops)
        batch.live = added(batch.live, action.live)
        batch.live[ACTIVATIONS] += moved * buffers_after(task)
        if kind in ("backward", "gradients of weights"):
            done.add(task.stage)
            batch.live[GRADIENTS] = batch.live[BUFFERS] = 0
            own = weights_of_stages(settings.weights, [stages[number] for number in sorted(done)])
            kept, gradients = passes[1].step.gradients(own)
            batch.live[kept] = gradients
    if split and settings.compute.activation_checkpointing != "none":
        batch.notes = (_RECOMPUTED.format(layout.schedule),)
    return batch


# -- passes of a GPT --------------------------------------------------------------------------------------------------


class Passes:
    """Simulator of forward and backward passes of pipeline stages. Each method NAME_pass(run, stage) simulates one pass of
    `stage`: it adds the pass's changes of memory, or its FLOPs, to the `MicroBatch` `run`."""

    def __init__(self, step: Step) -> None:
        self.step, settings = step, step.settings
        model, every = settings.gpt, settings.compute.activation_checkpointing
        recomputed = [isinstance(every, int) and i % every == 0 for i in range(model.n_blocks)]
        traced, kinds = representatives([(repr(model.layer(i)), recomputed[i]) for i in range(model.n_layer)])
        body = _body(step, traced)
        self.weights = settings.weights
        largest = gathered_groups(self.weights, tied=True)[0]  # the largest block, which has experts if any block does
        # (Bytes of the block's gradients before they are divided among ranks) / (bytes of gradients that each rank computes).
        share_in_experts = average_bytes(largest) / reduced_bytes(largest) if reduced_bytes(largest) else 1.0

        def split_gradient(share: float, gradient: int) -> tuple[int, int]:
            kept = 0 if step.gradients_exist else step.own_part(int(gradient * share))
            return kept, gradient - kept if step.fsdp and not step.keeps_gradients else 0

        ahead = (part for i in range(model.n_layer, model.n_blocks) for part in (i, None))
        layers = [None, *traced, None, *ahead]  # layer of each forward segment; None: no block

        def changes(segments: list[Segment]) -> list[Change]:
            summed = []
            for segment, layer in zip(segments, layers, strict=True):
                share = share_in_experts if layer is not None and model.layer(layer).experts else 1.0
                summed.append(Change.of(segment, partial(split_gradient, share), narrow_weights=step.narrow_weights))
            blocks = summed[1 : len(traced) + 1]
            return [summed[0], *(blocks[i] for i in kinds), *summed[len(traced) + 1 :]]

        forward, backward = body.passes[0], body.passes[1][::-1]
        if step.pipeline is not None:  # the loss's gradient of a tied matrix is on another rank
            backward[0] = [event for event in backward[0] if event[0] != LOSS_HEAD]
        self.forward, self.backward, self.head = changes(forward), changes(backward), _head(step, body)
        if step.pipeline is not None and SCHEDULES[step.pipeline.schedule].splits_backward:
            self.inputs = changes(_body(step, traced, split=True).passes[1][::-1])
            self.head_inputs = _head(step, body, split=True)[1:]

    def gathered(self, stage: StageShare) -> GatheredWeights:
        return GatheredWeights(self.step, weights_of_stages(self.weights, (stage,)))

    def forward_pass(self, run: MicroBatch, stage: StageShare) -> None:
        gathered, (blocks, norms) = self.gathered(stage), self._parts(self.forward, stage)
        if stage.first:
            run.play("forward", self.forward[0], gathered.forward(-1))
        for i, (block, norm) in enumerate(zip(blocks, norms, strict=True)):
            run.play("forward", block, gathered.forward(i))
            if norm is not None:
                part = i + 1 if i < stage.stop - stage.start else gathered.blocks
                run.play("forward", norm, gathered.forward(part))
                run.play("loss head", self.head[0], gathered.forward(part))

    def backward_pass(self, run: MicroBatch, stage: StageShare) -> None:
        step, gathered, (blocks, norms) = self.step, self.gathered(stage), self._parts(self.backward, stage)
        for i, (block, norm) in reversed([*enumerate(zip(blocks, norms, strict=True))]):
            for change in () if norm is None else (*self.head[1:], norm):
                run.play("loss head", change, gathered.backward(gathered.blocks))
            run.play("backward", block, gathered.backward(i))
            if gathered.sent:
                left = step.own_part(gathered.shared_gradients)
                run.compare("backward", run.live, gathered.reduction(i))
                run.live[GRADIENTS] += left if step.keeps_gradients else 0
                freed = gathered.gradients - (0 if step.gradients_exist else left)
                run.live[BUFFERS] -= gathered.sent if step.keeps_gradients else freed
        if stage.first:
            run.play("backward", self.backward[0], gathered.backward(-1))

    def reference_pass(self, run: MicroBatch, stage: StageShare) -> None:
        """Add only FLOPs and traffic of a forward pass without gradients to `run`: training has the higher memory peak."""
        blocks, norms = self._parts(self.forward, stage)
        head = [self.head[0]] * stage.last
        for change in (*[self.forward[0]] * stage.first, *blocks, *filter(None, norms), *head):
            run.counts = added(run.counts, change.counts)

    def inputs_pass(self, run: MicroBatch, stage: StageShare) -> None:
        """Add the changes of a backward pass of `stage` that computes only the gradients of the stage's inputs to `run`."""
        (blocks, norms), (head, release) = self._parts(self.inputs, stage), self.head_inputs
        gathered = self.gathered(stage).forward(0)
        for change in () if norms[-1] is None else (head, norms[-1]):
            run.play("loss head", change, gathered)
        for change in blocks[::-1] + [release] * stage.last:
            run.play("backward", change, gathered)

    @staticmethod
    def _parts(changes: list[Change], stage: StageShare) -> tuple[list[Change], list[Change | None]]:
        """Return (changes of a stage's blocks, including blocks that predict further tokens; for each of these blocks, the
        change of the norm between the block and a loss, or None if no loss follows the block)."""
        blocks, norms = changes[1 + stage.start : 1 + stage.stop], changes[1 + stage.stop :] if stage.last else []
        return blocks + norms[1::2], [None] * (len(blocks) - stage.last) + norms[::2]


def representatives(kinds: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return (`traced`: layers to trace; for each layer, the index in `traced` of the layer whose trace is used for it).

    The first layer, the last layer, and one layer of each kind in between are traced. `kinds`: the kind of each layer.
    """
    last = len(kinds) - 1
    between = {kind: i for i, kind in reversed(list(enumerate(kinds))) if 0 < i < last}
    traced = sorted({0, last, *between.values()})
    return traced, [traced.index(i if i in (0, last) else between[kind]) for i, kind in enumerate(kinds)]


def _body(step: Step, layers: list[int], *, split: bool = False) -> Body:
    """Return the trace of a model with the layers `layers`, without the loss: extrapolated from traces of 2 and 3 sequences if
    both have events of the same kinds, otherwise made with `step.sequences`. `split`: trace gradients of inputs only."""
    from lit_llm.plan.trace import trace_body

    few, more = (trace_body(step.traced(sequences), layers, split=split) for sequences in _TRACED_SEQUENCES)
    segments = extended(few.segments, more.segments, step.sequences - _TRACED_SEQUENCES[0])
    if segments is None:
        return trace_body(step.traced(step.sequences), layers, split=split)
    return replace(few, segments=segments)


def _head(step: Step, body: Body, *, split: bool = False) -> list[Change]:
    """Return the memory changes of the loss's forward pass and of its backward pass (two if `split`). Sizes of a chunked loss
    are linear in the rows (tokens) and in the rows of a chunk, so sizes for many rows follow from traces of few rows."""
    from lit_llm.plan.trace import trace_head

    settings, tp = step.settings, step.settings.layout.tensor_parallel
    # The model pads sequences for tensor parallelism itself.
    rows = step.sequences * (settings.sequence_length if settings.layout.context == 1 else settings.local_length)
    alone = replace(step.traced(0).settings, compute=ComputeConfig(), lora=None)  # shared by all modes of recomputation
    # Every loss but cross-entropy of an unsplit vocabulary is computed in chunks; in one chunk if no size is set.
    chunk = settings.loss.chunk_size or (None if tp == 1 and settings.loss_head == "cross-entropy" else rows)
    block = max(1, SOFTMAX_NUMEL // (settings.gpt.padded_vocab_size // tp))  # rows that the softmax takes at once

    def at(rows: int, chunk: int | None) -> list[Change]:
        of, dtype, trainable = Step(alone, 0, cuda=step.cuda), body.hidden_dtype, body.head_is_trainable
        segments = trace_head(of, rows, chunk, hidden_dtype=dtype, trainable=trainable, split=split)
        # A tied matrix is gathered in the dtype that the embedding needs.
        narrow = step.narrow_weights and not settings.gpt.tie_embeddings
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
