"""The memory and FLOPs of a micro-batch of a user's module, traced as a whole.

Nothing is assumed about its structure: forward, the loss of training and backward run once, on tensors without data. Sizes are
linear in the number of sequences, so two numbers are traced, and any other follows. A module that takes too many operations,
such as a Python loop over time, is traced on more and shorter sequences.

What depends on values, or on an operator without a rule for sizes, stays unknown, and a note says why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.distributed.activation_checkpointing import recompute_block, recomputes
from lit_llm.models.loss import LossSums, cross_entropy_of_logits
from lit_llm.plan.built_model import build_own, place, said
from lit_llm.plan.kernels import CudaKernels
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.recorder import Recorder, TooManyOperations, Undetermined
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.segments import (
    ACTIVATIONS,
    GRADIENTS,
    LOSS_HEAD,
    Bytes,
    Change,
    GatheredWeights,
    MicroBatch,
    Operation,
    Segment,
    Step,
    extended,
)
from lit_llm.plan.trace import batch_without_data, dtypes, recorded, without_data
from lit_llm.plan.weights import OwnModel, cached_by_text, weights_of

PHASES = ("forward", "loss head", "loss head", "backward")
MOST_OPERATIONS = 25_000
"""Of a traced micro-batch, which takes about a second. A Transformer of 80 layers has 15,000."""
_TOLERANCE = 0.01
"""Of figures that are extended from short sequences, at a length that did not take part."""
_ON_GPU = {  # operators whose kernels of a GPU need memory that is not known here
    "mkldnn_rnn_layer": "LSTM layers are counted as on a CPU: what cuDNN's keep for the backward pass is not known",
    "convolution": "work memory of cuDNN's convolutions is not counted",
}


def micro_batch_of_own(step: Step) -> MicroBatch:
    """Memory and FLOPs of a micro-batch of an `OwnModel`. What cannot be traced is missing, and a note says so."""
    try:
        sequences = step.sequences
        made = _extended(step, sequences, step.settings.sequence_length) if sequences > 3 else None
        return made or _play(step, (one := trace(step, sequences)).segments, one.operators)
    except TooManyOperations:
        return _from_short_sequences(step)
    except Undetermined as reason:
        return _unknown(step, str(reason))


def flops_per_token(model: OwnModel, length: int | None) -> tuple[float, float]:
    """FLOPs of matrix products and of attention that one token takes in training, without recomputation.

    Six per parameter, and none, where the module cannot be traced.
    """
    step = Step(RunSettings(model, Optimizer("SGD"), steps=1, global_batch=2, length=length), 2)
    made = micro_batch_of_own(step)
    if not made.is_known:
        return 6.0 * sum(weight.total for weight in weights_of(model)), 0.0
    matmul, attention = made.counts[:2]
    return matmul / step.tokens, attention / step.tokens


def _own(step: Step) -> OwnModel:
    assert isinstance(step.settings.model, OwnModel)
    return step.settings.model


def _unknown(step: Step, reason: str) -> MicroBatch:
    note = (
        f"the memory of activations is unknown, and six FLOPs per parameter and token are assumed: "
        f"{_own(step).architecture.class_path} cannot be traced, because {reason}"
    )
    _, held = replace(step, gradients_exist=False).gradients(weights_of(step.settings.model))
    return MicroBatch({"backward": {"gradients": held}}, notes=(note,), is_known=False)


# -- one trace --------------------------------------------------------------------------------------------------------


def _extended(step: Step, sequences: float, length: int) -> MicroBatch | None:
    """`sequences` of `length` tokens, from two and three of them; None if these do other operations."""
    step = _of_length(step, length)
    few, more = trace(step, 2), trace(step, 3)
    segments = extended(few.segments, more.segments, sequences - 2)
    return None if segments is None else _play(step, segments, few.operators)


def _play(step: Step, segments: Sequence[Segment], operators: Set[str]) -> MicroBatch:
    """The micro-batch with these events in its phases.

    FSDP2 has the largest block whole all the time, and its gradients all the time of the backward pass.
    """
    weights, exist = weights_of(step.settings.model), step.gradients_exist
    gathered = GatheredWeights(step, weights, already_gathered=exist, last=exist or step.micro_batches == 1)
    gradients = gathered.gradients + gathered.root_gradients + gathered.sent
    beside = {
        "forward": gathered.forward(0),
        "loss head": gathered.forward(gathered.blocks),
        "backward": Bytes(gathered.forward(0).own + gradients, gathered.forward(0).sent),
    }
    made = MicroBatch(notes=tuple(note for operator, note in _ON_GPU.items() if step.cuda and operator in operators))
    kind, held = step.gradients(weights)
    made.live[ACTIVATIONS], made.live[kind] = step.ids_bytes, held
    for i, (phase, segment) in enumerate(zip(PHASES, segments, strict=True)):
        if i == len(PHASES) // 2 and not exist:  # zero_grad, between forward and backward
            made.live[GRADIENTS] -= held
        change = Change.of(segment, lambda gradient: (0 if exist else step.own_part(gradient), 0))
        made.play(phase, change, beside[phase])
    return made


def _of_length(step: Step, length: int) -> Step:
    return replace(step, settings=replace(step.settings, length=length))


@dataclass(frozen=True)
class Trace:
    """The events of a micro-batch: of forward, forward and backward of the loss, and backward.

    Attributes:
        operators: those that ran.
        operations: how many times one ran.
    """

    segments: list[Segment]
    operators: frozenset[str]
    operations: int


def trace(step: Step, sequences: int) -> Trace:
    """Trace `sequences` of the step's length.

    Raises:
        Undetermined: the module depends on more than sizes, or fails.
        TooManyOperations: a trace would take long.
        UserError: the module breaks the contract.
    """
    found = cached_trace(step.traced(sequences))
    if isinstance(found, Exception):
        raise found
    return found


@cached_by_text
def cached_trace(step: Step) -> Trace | Exception:
    """A trace, or why there is none."""
    model, mode = _own(step), step.settings.compute.activation_checkpointing
    module, recorder = build_own(model.architecture, model.vocab_size), Recorder(cuda=step.cuda, most=MOST_OPERATIONS)
    for i, block in enumerate(module.blocks):
        if recomputes(mode, i):
            if step.cuda:
                CudaKernels.around(block)
            recompute_block(block, mode, preserve_rng_state=False)
    without_data(module, dtypes(step)[0], recorder)
    ids, targets = batch_without_data(step, recorder)

    def loss(z: Tensor, targets: Tensor) -> LossSums:
        if not z.requires_grad:
            raise Undetermined("its logits depend on no parameter that is trained")
        recorder.begin(LOSS_HEAD)
        z.register_hook(lambda gradient: recorder.begin(ACTIVATIONS))
        return cross_entropy_of_logits(z, targets, z_loss=1.0 if step.settings.z_loss else 0.0)

    default = torch.get_default_dtype()
    try:
        with redirect_stdout(sys.stderr), recorded(step, recorder):
            torch.set_default_dtype(dtypes(step)[0])  # as Lightning does
            total = module(ids, targets, loss=loss).loss
            recorder.begin()
            torch.autograd.backward(total)
            del total
    except (TooManyOperations, UserError) as error:
        return error.with_traceback(None)
    except Undetermined as reason:
        return Undetermined(f"{reason}{place(reason)}")
    except Exception as error:  # of the user's code, of any kind
        return Undetermined(f"it fails on tensors without data: {said(error)}")
    finally:
        torch.set_default_dtype(default)
    return Trace(recorder.copied(), frozenset(recorder.operators), recorder.operations)


# -- short sequences --------------------------------------------------------------------------------------------------


def _from_short_sequences(step: Step) -> MicroBatch:
    """A micro-batch of a module that takes too many operations, from more and shorter sequences with as many tokens.

    With the number of tokens fixed, a figure is a + b·T + c/T: what grows with tokens or is constant, attention, and states of
    a recurrence. Lengths u, 2u and 3u determine it, and 4u tests it.
    """
    many, whole = f"it takes more than {MOST_OPERATIONS:,} operations", step.settings.sequence_length
    try:
        per_token = (trace(_of_length(step, 16), 2).operations - trace(_of_length(step, 8), 2).operations) / 8
        unit = min(whole // 8, max(4, int(MOST_OPERATIONS / 20 / max(per_token, 1))))
        found = [_extended(step, step.tokens / (i * unit), i * unit) for i in (1, 2, 3, 4)]
    except TooManyOperations:
        return _unknown(step, f"{many} for a few tokens")
    except Undetermined as reason:
        return _unknown(step, f"{many}, and {reason}")
    made = [each for each in found if each is not None]
    lengths = [unit, 2 * unit, 3 * unit]
    if len(made) < 4 or not _are_near(_at(4 * unit, lengths, made[:3]), made[3]):
        return _unknown(step, f"{many}, and its figures for short sequences do not show those for long ones")
    note = (
        f"memory and FLOPs follow from sequences of {unit} to {3 * unit} tokens, because those of {whole:,} take more than "
        f"{MOST_OPERATIONS:,} operations"
    )
    return replace(_at(whole, lengths, made[:3]), notes=(note, *made[0].notes))


def _are_near(one: MicroBatch, other: MicroBatch) -> bool:
    figures = ([max(sum(peak.values()) for peak in made.peaks.values()), made.written, made.flops] for made in (one, other))
    return all(abs(a - b) <= _TOLERANCE * b for a, b in zip(*figures, strict=True))


def _at(length: int, lengths: Sequence[int], known: Sequence[MicroBatch]) -> MicroBatch:
    """The micro-batch at another length, of figures a + b·T + c/T."""
    rows = torch.tensor([[1.0, t, 1.0 / t] for t in lengths], dtype=torch.float64)
    wanted = torch.tensor([1.0, length, 1.0 / length], dtype=torch.float64)
    shares = torch.linalg.solve(rows.T, wanted).tolist()

    def figure(values: Sequence[int]) -> int:
        return round(sum(share * value for share, value in zip(shares, values, strict=True)))

    def of_kinds(lives: Sequence[dict[str, int]]) -> dict[str, int]:
        return {kind: max(0, figure([live[kind] for live in lives])) for kind in lives[0]}

    return MicroBatch(
        {phase: of_kinds([made.peaks[phase] for made in known]) for phase in known[0].peaks},
        timeline=[
            Operation(of[0].phase, of_kinds([each.live for each in of]), figure([each.flops for each in of]))
            for of in zip(*(made.timeline for made in known), strict=True)
        ],
        counts=[figure(of) for of in zip(*(made.counts for made in known), strict=True)],
    )
