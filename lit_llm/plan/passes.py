"""The memory and FLOPs of one micro-batch, from traces of the model.

Blocks of one kind allocate the same, so one of each kind is traced, besides the first and the last. Sizes are linear in the
number of sequences, so two numbers are traced, and any other follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_llm.core.memory import SOFTMAX_NUMEL
from lit_llm.distributed.pipeline_layers import KINDS as SCHEDULES
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.gathering import FSDP2, Bytes, GatheredWeights
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.pipeline import StageShare, weights_of_stages
from lit_llm.plan.settings import BYTES, RunSettings
from lit_llm.plan.weights import Key, gradient_bytes, reduced_bytes, stored_bytes

if TYPE_CHECKING:  # imports torch
    from lit_llm.plan.trace import Body, Numerics, Segment

KINDS = ("activations", "loss head", "gradients", "weight copies", "communication buffers")
ACTIVATIONS, LOSS_HEAD, GRADIENTS, WEIGHT_COPIES, BUFFERS = range(len(KINDS))
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
    def model(self) -> GPTConfig:
        return self.settings.model

    @property
    def parameter_bytes(self) -> int:
        """Bytes of an element of the weights (4 = fp32 masters)."""
        return BYTES[self.settings.precision][0]

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in matrix products; fewer than `parameter_bytes` under autocast."""
        return BYTES[self.settings.precision][1]

    @property
    def tensor_parallel(self) -> int:
        """Ranks that split heads, hidden width and vocabulary, and the positions between the matrices."""
        return self.settings.layout.tensor_parallel

    @property
    def context(self) -> int:
        """Ranks that share each sequence."""
        return self.settings.layout.context

    @property
    def gathers_keys(self) -> bool:
        """These ranks gather keys and values. Otherwise they exchange positions for heads."""
        return self.settings.layout.context_attention == "gather"

    @property
    def shard_gradients(self) -> int:
        """Ranks that share the gradients."""
        return 1 if self.alone else self.settings.layout.divisor("gradients")

    @property
    def pipeline(self) -> PipelineLayout | None:
        """None: the whole model is on this rank."""
        return self.settings.layout.pipeline if self.stages else None

    @property
    def fsdp(self) -> FSDP2 | None:
        layout = self.settings.layout
        if self.alone or not layout.fsdp2:
            return None
        return FSDP2(layout.divisor("parameters"), layout.kept, layout.prefetch)

    @property
    def whole_length(self) -> int:
        """Tokens of a sequence."""
        return self.settings.sequence_length

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on this rank, padded as `GPT.view` does: one chunk, or two if keys are gathered."""
        multiple = (2 if self.gathers_keys and self.context > 1 else 1) * self.context * self.tensor_parallel
        return -(-self.whole_length // multiple) * multiple // self.context

    @property
    def traced_length(self) -> int:
        """Tokens of a sequence for which the loss is computed here. The model pads them for tensor parallelism itself."""
        return self.whole_length if self.context == 1 else self.local_length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.sequences * self.local_length

    @property
    def narrow_weights(self) -> bool:
        """FSDP2 gathers linear layers in the compute dtype, so autocast makes no copies of them."""
        if self.fsdp is None or isinstance(self.model, CustomConfig):
            return False
        return self.compute_bytes < self.parameter_bytes


class Operation(NamedTuple):
    """Forward or backward of a block, the embedding, the last norm or the loss."""

    phase: str
    live: dict[str, int]
    """Bytes by kind at its peak."""
    flops: int


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
        notes: what is unknown or assumed, one sentence each. Only of custom models.
        kernels: that write new memory, in a custom model; 0 for a GPT.
        is_known: False: a custom model cannot be traced, so there are only gradients.
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

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class _Change:
    """What a segment does: live bytes by kind at its end and at its peak, relative to its begin."""

    end: tuple[int, ...]
    peak: tuple[int, ...]
    written: int
    flops: tuple[int, int]


class Passes:
    """What the passes of stages do. `step.gradients_exist`: of an earlier micro-batch."""

    def __init__(self, step: Step) -> None:
        traced, kinds = representatives(_kinds_of_blocks(step))
        body = _body(step, traced)
        self.step, shard = step, step.shard_gradients
        self.whole = step.fsdp is not None and step.fsdp.kept.gradients and step.gradients_exist

        def split_gradient(gradient: int) -> tuple[int, int]:
            """Bytes of a gradient that are left at the end, and bytes that are freed when it has been reduced."""
            kept = 0 if step.gradients_exist else gradient // shard
            return kept, 0 if step.fsdp is None or self.whole else gradient - kept

        def changes(segments: list[Segment]) -> list[_Change]:
            return [_change(segment, split_gradient, step.narrow_weights) for segment in segments]

        other_keys = _gathered_keys(step)

        def of_blocks(found: list[_Change], more: int) -> list[_Change]:
            return [_with_activations(found[i], more, step.context) for i in kinds]

        forward, backward = changes(body.forward), changes(body.backward)
        if step.pipeline is not None:  # the loss's gradient of a tied matrix is on another rank
            [backward[-1]] = changes([[event for event in body.backward[-1] if event[0] != LOSS_HEAD]])
        self.embedding, self.blocks, self.norm = forward[0], of_blocks(forward[1:-1], other_keys), forward[-1]
        self.norm_back, self.embedding_back = backward[0], backward[-1]
        self.blocks_back = of_blocks(backward[-2:0:-1], -other_keys)
        self.head = _head(step, body)
        self.weights = weights_of(step.model, step.settings.lora, step.tensor_parallel)
        if step.pipeline is not None and SCHEDULES[step.pipeline.schedule].splits_backward:
            split = changes(_body(step, traced, split=True).backward)
            self.norm_inputs, self.blocks_inputs = split[0], of_blocks(split[-2:0:-1], 0)
            self.head_inputs = _head(step, body, split=True)[1:]

    def gradients(self, stages: Sequence[StageShare]) -> tuple[int, int]:
        """Gradients between two backward passes: their kind, and their bytes."""
        step, own = self.step, weights_of_stages(self.weights, stages)
        if self.whole:
            return BUFFERS, reduced_bytes(own)
        split = step.tensor_parallel if step.fsdp is None else 1
        return GRADIENTS, gradient_bytes(own, step.parameter_bytes, split) // step.shard_gradients

    def gathered(self, stage: StageShare) -> GatheredWeights:
        step, in_pipeline = self.step, self.step.pipeline is not None
        return GatheredWeights(
            step.fsdp,
            weights_of_stages(self.weights, (stage,)),
            (step.parameter_bytes, step.compute_bytes),
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
        count, gathered, exist = stage.stop - stage.start, self.gathered(stage), self.step.gradients_exist
        run.play("loss head", [*self.head[1:], self.norm_back] * stage.last, gathered.backward(count))
        for i, change in reversed(list(enumerate(self.blocks_back[stage.start : stage.stop]))):
            run.play("backward", [change], gathered.backward(i))
            if gathered.sent:
                left = gathered.gradients // self.step.shard_gradients
                run.compare("backward", run.live, gathered.reduction(i))
                run.live[GRADIENTS] += left if self.whole else 0
                run.live[BUFFERS] -= gathered.sent if self.whole else gathered.gradients - (0 if exist else left)
        run.play("backward", [self.embedding_back] * stage.first, gathered.backward(-1))

    def inputs_pass(self, run: Run, stage: StageShare) -> None:
        """The gradients of inputs."""
        gathered, (head, release) = self.gathered(stage), self.head_inputs
        run.play("loss head", [head, self.norm_inputs] * stage.last, gathered.forward(0))
        run.play("backward", self.blocks_inputs[stage.start : stage.stop][::-1] + [release] * stage.last, gathered.forward(0))


def played(step: Step, phases: Sequence[tuple[str, tuple[Any, ...]]]) -> MicroBatch:
    """A micro-batch of a model that was traced as a whole: its phases, and what each does (the fields of `_Change`).

    FSDP2 has the largest block whole all the time, and its gradients all the time of the backward pass.
    """
    weights = weights_of(step.model)
    sizes = step.parameter_bytes, step.compute_bytes
    gathered = GatheredWeights(step.fsdp, weights, sizes, already_gathered=step.gradients_exist, last=step.gradients_exist)
    gradients = gathered.gradients + gathered.root_gradients + gathered.sent
    beside = {
        "forward": gathered.forward(0),
        "loss head": gathered.forward(gathered.blocks),
        "backward": Bytes(gathered.forward(0).own + gradients, gathered.forward(0).sent),
    }
    held = stored_bytes(weights, step.parameter_bytes, trainable=True) // step.shard_gradients
    run = Run()
    run.live[ACTIVATIONS] = 2 * step.tokens * 8  # ids and targets
    run.live[GRADIENTS] = held
    if step.gradients_exist and step.fsdp is not None and step.fsdp.kept.gradients:
        run.live[GRADIENTS], run.live[BUFFERS] = 0, reduced_bytes(weights)
    for i, (phase, change) in enumerate(phases):
        if i == len(phases) // 2 and not step.gradients_exist:  # zero_grad, between forward and backward
            run.live[GRADIENTS] -= held
        run.play(phase, [_Change(*change)], beside[phase])
    timeline = tuple(run.timeline) if step.timeline else ()
    return MicroBatch(run.peaks, run.written, run.flops[0], run.flops[1], timeline, run.on_other_streams)


def _gathered_keys(step: Step) -> int:
    """Bytes of the keys and values of other ranks that a block keeps for its backward pass."""
    recomputed = step.settings.compute.activation_checkpointing in ("full", "attention")
    if step.context == 1 or not step.gathers_keys or recomputed:
        return 0
    heads = step.model.kv_heads // step.tensor_parallel
    others = step.local_length * (step.context - 1)
    return 2 * step.sequences * others * heads * step.model.resolved_head_dim * step.compute_bytes


def _with_activations(change: _Change, more: int, context: int) -> _Change:
    """A block's change with gathered keys, whose attention sees `context` times the traced positions."""
    if context == 1:
        return change

    def moved(live: tuple[int, ...], by: int) -> tuple[int, ...]:
        return tuple(size + (by if kind == ACTIVATIONS else 0) for kind, size in enumerate(live))

    flops = change.flops[0], change.flops[1] * context
    return _Change(moved(change.end, more), moved(change.peak, max(more, 0)), change.written, flops)


class Run:
    """Plays changes one after the other."""

    def __init__(self) -> None:
        self.live = [0] * len(KINDS)
        self.peaks: dict[str, dict[str, int]] = {}
        self.on_other_streams: dict[str, int] = {}
        self.timeline: list[Operation] = []
        self.written = 0
        self.flops = [0, 0]

    def play(self, phase: str, changes: Sequence[_Change], held: Bytes) -> None:
        """One after the other, beside what FSDP2 has `held`."""
        for change in changes:
            self.compare(phase, [a + b for a, b in zip(self.live, change.peak, strict=True)], held, sum(change.flops))
            self.live = [a + b for a, b in zip(self.live, change.end, strict=True)]
            self.written += change.written
            self.flops = [a + b for a, b in zip(self.flops, change.flops, strict=True)]

    def compare(self, phase: str, live: list[int], held: Bytes, flops: int = 0) -> None:
        found = dict(zip(KINDS, live, strict=True))
        found[KINDS[BUFFERS]] += sum(held)
        self.timeline.append(Operation(phase, found, flops))
        if phase not in self.peaks or sum(found.values()) > sum(self.peaks[phase].values()):
            self.peaks[phase], self.on_other_streams[phase] = found, held.sent


def _change(segment: Segment, split_gradient: Callable[[int], tuple[int, int]], narrow_weights: bool) -> _Change:
    live, total, most, written, flops = [0] * len(KINDS), 0, 0, 0, [0, 0]
    peak = tuple(live)
    for kind, amount in segment:
        if kind >= len(KINDS):
            flops[kind - len(KINDS)] += amount
            continue
        if narrow_weights and kind == WEIGHT_COPIES:
            continue
        if kind == GRADIENTS:
            amount, passing = split_gradient(amount)
            live[BUFFERS] += passing
            total += passing
        elif amount > 0:
            written += amount
        live[kind] += amount
        total += amount
        if total > most:
            most, peak = total, tuple(live)
    return _Change(tuple(live), peak, written, (flops[0], flops[1]))


def representatives(kinds: Sequence[Any]) -> tuple[list[int], list[int]]:
    """(layers to trace, for each layer the place in them): the first, the last, and one of each kind in between."""
    last = len(kinds) - 1
    between = {kind: i for i, kind in reversed(list(enumerate(kinds))) if 0 < i < last}
    traced = sorted({0, last, *between.values()})
    return traced, [traced.index(i if i in (0, last) else between[kind]) for i, kind in enumerate(kinds)]


def _kinds_of_blocks(step: Step) -> list[Any]:
    every = step.settings.compute.activation_checkpointing
    return [
        (repr(step.model.layer(i)), isinstance(every, int) and i % every == 0)  # its settings, and whether it is recomputed
        for i in range(step.model.n_layer)
    ]


# -- traces, cached ---------------------------------------------------------------------------------------------------


def _numerics(parameter_bytes: int, compute_bytes: int, cuda: bool) -> Numerics:
    import torch

    from lit_llm.plan.trace import Numerics

    dtypes = {4: torch.float32, 2: torch.bfloat16}
    return Numerics(dtypes[parameter_bytes], dtypes[compute_bytes], cuda)


def _body(step: Step, layers: list[int], *, split: bool = False) -> Body:
    """The body's trace, from those of two numbers of sequences if these do the same operations. `split`: see `trace_body`."""
    from lit_llm.plan.trace import Body

    mode = step.settings.compute.activation_checkpointing
    model, lora, length = Key(step.model), Key(step.settings.lora), step.traced_length
    numerics = _numerics(step.parameter_bytes, step.compute_bytes, step.cuda)

    def at(sequences: int) -> Body:
        options = (step.tensor_parallel, step.settings.compute.compile and not step.alone, split)
        return _traced_body(model, lora, tuple(layers), mode, numerics, sequences, length, *options)

    few, more = (at(sequences) for sequences in _TRACED_SEQUENCES)
    if step.sequences in _TRACED_SEQUENCES or not few.does_the_same(more):
        return at(step.sequences)
    further = step.sequences - _TRACED_SEQUENCES[0]

    def extended(first: list[Segment], second: list[Segment]) -> list[Segment]:
        return [
            [(kind, a + further * (b - a)) for (kind, a), (_, b) in zip(one, two, strict=True)]
            for one, two in zip(first, second, strict=True)
        ]

    forward, backward = extended(few.forward, more.forward), extended(few.backward, more.backward)
    return Body(forward, backward, few.hidden_dtype, few.head_is_trainable)


@lru_cache(maxsize=256)
def _traced_body(
    model: Key,
    lora: Key,
    layers: tuple[int, ...],
    checkpointing: Any,
    numerics: Any,
    sequences: int,
    length: int,
    tensor_parallel: int,
    compiled: bool,
    split: bool,
) -> Body:
    from lit_llm.plan.trace import trace_body

    return trace_body(
        model.value,
        lora.value,
        layers,
        checkpointing,
        numerics,
        sequences=sequences,
        length=length,
        tensor_parallel=tensor_parallel,
        compiled=compiled,
        split=split,
    )


def _head(step: Step, body: Body, *, split: bool = False) -> list[_Change]:
    """Forward and backward of the loss, see `trace_head`. The chunked loss is linear in its rows and in those of a chunk."""
    from lit_llm.plan.model import local_config

    model = local_config(step.model, step.tensor_parallel)
    rows = step.sequences * step.traced_length
    # A split vocabulary always uses the chunked loss, with one chunk if no size is set.
    chunk = step.settings.chunk_size if step.tensor_parallel == 1 else step.settings.chunk_size or rows
    numerics = _numerics(step.parameter_bytes, step.compute_bytes, step.cuda)
    block = max(1, SOFTMAX_NUMEL // model.padded_vocab_size)  # rows of its softmax

    def at(rows: int, chunk: int | None) -> list[_Change]:
        # A tied matrix is gathered as the embedding needs it.
        narrow = step.narrow_weights and not model.tie_embeddings
        options = (step.settings.z_loss, body.hidden_dtype, body.head_is_trainable, narrow, split)
        return _traced_head(Key(model), numerics, rows, chunk, *options)

    if chunk is None or rows <= _MOST_BLOCKS * block:
        return at(rows, chunk)
    chunk = min(chunk, rows)
    if chunk <= 2 * block:  # many chunks: linear in the whole chunks, besides the rows of the last one
        rest = rows % chunk
        few, more = at(2 * chunk + rest, chunk), at(3 * chunk + rest, chunk)
        return [_extended(a, b, rows // chunk - 2) for a, b in zip(few, more, strict=True)]
    few, of_rows, of_chunk = at(4 * block, 2 * block), at(6 * block, 2 * block), at(6 * block, 3 * block)
    found = []
    for a, b, c in zip(few, of_rows, of_chunk, strict=True):
        more_rows = _extended(a, b, (rows / block - 4) / 2)
        more_chunk = _extended(b, c, chunk / block - 2)
        found.append(_added(more_rows, more_chunk, b))
    return found


@lru_cache(maxsize=1024)
def _traced_head(
    model: Key,
    numerics: Any,
    rows: int,
    chunk_size: int | None,
    z_loss: bool,
    hidden_dtype: Any,
    trainable: bool,
    narrow: bool,
    split: bool,
) -> list[_Change]:
    from lit_llm.plan.trace import trace_head

    segments = trace_head(
        model.value,
        numerics,
        rows=rows,
        chunk_size=chunk_size,
        z_loss=z_loss,
        hidden_dtype=hidden_dtype,
        trainable=trainable,
        split=split,
    )
    return [_change(segment, lambda gradient: (gradient, 0), narrow) for segment in segments]


def _numbers(change: _Change) -> list[int]:
    return [*change.end, *change.peak, change.written, *change.flops]


def _change_of(numbers: Sequence[float]) -> _Change:
    n, whole = len(KINDS), [round(number) for number in numbers]
    return _Change(tuple(whole[:n]), tuple(whole[n : 2 * n]), whole[2 * n], (whole[-2], whole[-1]))


def _extended(first: _Change, second: _Change, times: float) -> _Change:
    """`first` plus `times` the difference to `second`."""
    return _change_of([a + times * (b - a) for a, b in zip(_numbers(first), _numbers(second), strict=True)])


def _added(first: _Change, second: _Change, shared: _Change) -> _Change:
    """first + second - shared."""
    numbers = zip(_numbers(first), _numbers(second), _numbers(shared), strict=True)
    return _change_of([a + b - c for a, b, c in numbers])
