"""The memory and FLOPs of a micro-batch of a user's module, traced as a whole.

Nothing is assumed about its structure: forward, the loss of training and backward run once, on tensors without data. Sizes are
linear in the number of sequences, so two numbers are traced, and any other follows. A module that takes too many operations,
such as a Python loop over time, is traced on more and shorter sequences.

What depends on values, or on an operator without a rule for sizes, stays unknown, and a note says why.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence, Set
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.distributed.activation_checkpointing import recompute_block, recomputes
from lit_llm.models.loss import LossSums, cross_entropy_of_logits
from lit_llm.plan.cuda import CudaKernels
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.custom_model import build, place, said
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.passes import KINDS, MicroBatch, Operation, Step, played
from lit_llm.plan.recorder import (
    ACTIVATIONS,
    ATTENTION,
    GRADIENTS,
    LOSS_HEAD,
    MATMUL,
    Recorder,
    TooManyOperations,
    Undetermined,
    sized,
)
from lit_llm.plan.settings import RunSettings
from lit_llm.plan.trace import Numerics, without_data
from lit_llm.plan.weights import Key, stored_bytes

PHASES = ("forward", "loss head", "loss head", "backward")
MOST_OPERATIONS = 25_000
"""Of a traced micro-batch, which takes about a second. A Transformer of 80 layers has 15,000."""
_TOLERANCE = 0.01
"""Of figures that are extended from short sequences, at a length that did not take part."""
_DTYPES = {4: torch.float32, 2: torch.bfloat16}
_ON_GPU = {  # operators whose kernels of a GPU need memory that is not known here
    "mkldnn_rnn_layer": "LSTM layers are counted as on a CPU: what cuDNN's keep for the backward pass is not known",
    "convolution": "work memory of cuDNN's convolutions is not counted",
}


def micro_batch(step: Step) -> MicroBatch:
    """Memory and FLOPs of a micro-batch of a `CustomConfig`. What cannot be traced is missing, and a note says so."""
    assert isinstance(step.model, CustomConfig)
    try:
        made, traced = _played(step)
        return replace(made, notes=_of_kernels(step, traced.operators))
    except TooManyOperations:
        return _from_short_sequences(step)
    except Undetermined as reason:
        return _unknown(step, str(reason))


def flops_per_token(config: CustomConfig, length: int | None) -> tuple[float, float]:
    """FLOPs of matrix products and of attention that one token takes in training, without recomputation.

    Six per parameter, and none, where the module cannot be traced.
    """
    step = Step(RunSettings(config, Optimizer("SGD"), steps=1, global_batch=2, length=length), 2)
    made = micro_batch(step)
    if not made.is_known:
        return 6.0 * sum(weight.total for weight in weights_of(config)), 0.0
    return made.matmul_flops / step.tokens, made.attention_flops / step.tokens


def _unknown(step: Step, reason: str) -> MicroBatch:
    assert isinstance(step.model, CustomConfig)
    gradients = stored_bytes(weights_of(step.model), step.parameter_bytes, trainable=True) // step.shard_gradients
    note = (
        f"the memory of activations is unknown, and six FLOPs per parameter and token are assumed: "
        f"{step.model.architecture.class_path} cannot be traced, because {reason}"
    )
    return MicroBatch({"backward": {"gradients": gradients}}, 0, 0, 0, notes=(note,), is_known=False)


# -- one trace --------------------------------------------------------------------------------------------------------


def _played(step: Step) -> tuple[MicroBatch, Trace]:
    """The micro-batch from one trace, or from those of two and three sequences if these do the same."""
    if step.sequences > 3 and (made := _extended(step, step.sequences, step.whole_length)) is not None:
        return made
    one = trace(step, step.sequences)
    return _play(step, one.amounts, one), one


def _extended(step: Step, sequences: float, length: int) -> tuple[MicroBatch, Trace] | None:
    """`sequences` of `length` tokens, from two and three of them; None if these do other operations."""
    step = _of_length(step, length)
    few, more = trace(step, 2), trace(step, 3)
    if few.ends != more.ends or not torch.equal(few.kinds, more.kinds):
        return None
    amounts = few.amounts + ((sequences - 2) * (more.amounts - few.amounts)).round().long()
    return _play(step, amounts, few), few


def _play(step: Step, amounts: Tensor, of: Trace) -> MicroBatch:
    starts = (0, *of.ends)
    changes = [_change(step, of.kinds[a:b], amounts[a:b]) for a, b in itertools.pairwise(starts)]
    kernels = int(((of.kinds < len(KINDS)) & (of.kinds != GRADIENTS) & (amounts > 0)).sum())
    return replace(played(step, list(zip(PHASES, changes, strict=True))), kernels=kernels)


def _change(step: Step, kinds: Tensor, amounts: Tensor) -> tuple[Any, ...]:
    """What a segment does: bytes by kind at its end and at its peak, all bytes that it writes, and FLOPs."""
    gradients = torch.zeros_like(amounts) if step.gradients_exist else amounts // step.shard_gradients
    sizes = torch.where(kinds == GRADIENTS, gradients, amounts).where(kinds < len(KINDS), 0)
    live = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    highest = int(live.argmax())

    def by_kind(until: int) -> tuple[int, ...]:
        return tuple(int(sizes[:until][kinds[:until] == kind].sum()) for kind in range(len(KINDS)))

    written = int(sizes[(sizes > 0) & (kinds != GRADIENTS)].sum())
    flops = int(amounts[kinds == MATMUL].sum()), int(amounts[kinds == ATTENTION].sum())
    return by_kind(len(sizes)), by_kind(highest), written, flops


def _of_kernels(step: Step, operators: Set[str]) -> tuple[str, ...]:
    return tuple(note for operator, note in _ON_GPU.items() if step.cuda and operator in operators)


@dataclass(frozen=True)
class Trace:
    """The events of a micro-batch.

    Attributes:
        kinds, amounts: of each event.
        ends: of forward, forward and backward of the loss, and backward.
        operators: those that ran.
        operations: how many times one ran.
    """

    kinds: Tensor
    amounts: Tensor
    ends: tuple[int, ...]
    operators: frozenset[str]
    operations: int


def trace(step: Step, sequences: int) -> Trace:
    """Trace `sequences` of the step's length.

    Raises:
        Undetermined: the module depends on more than sizes, or fails.
        TooManyOperations: a trace would take long.
        UserError: the module breaks the contract.
    """
    settings, sizes = step.settings, (step.parameter_bytes, step.compute_bytes)
    options = {"mode": settings.compute.activation_checkpointing, "z_loss": bool(settings.z_loss), "cuda": step.cuda}
    found = _trace(Key(step.model), sequences, step.whole_length, sizes, **options)
    if isinstance(found, Exception):
        raise found
    return found


@lru_cache(maxsize=256)
def _trace(
    key: Key, sequences: int, length: int, sizes: tuple[int, int], *, mode: str | int, z_loss: bool, cuda: bool
) -> Trace | Exception:
    """A trace, or why there is none. `sizes`: bytes of an element of the weights, and in matrix products."""
    config: CustomConfig = key.value
    weights, products = (_DTYPES[size] for size in sizes)
    model = build(config)
    recorder = Recorder(cuda=cuda, most=MOST_OPERATIONS)
    for i, block in enumerate(model.blocks):
        if recomputes(mode, i):
            if cuda:
                CudaKernels.around(block)
            recompute_block(block, mode, preserve_rng_state=False)
    without_data(model, weights, recorder)
    ids, targets = (sized(sequences, length, dtype=torch.int64) for _ in range(2))
    recorder.exclude((ids, targets))

    def loss(z: Tensor, targets: Tensor) -> LossSums:
        if not z.requires_grad:
            raise Undetermined("its logits depend on no parameter that is trained")
        recorder.begin()
        recorder.kind = LOSS_HEAD
        z.register_hook(lambda gradient: _begin_backward(recorder))
        return cross_entropy_of_logits(z, targets, z_loss=1.0 if z_loss else 0.0)

    default = torch.get_default_dtype()
    try:
        with redirect_stdout(sys.stderr), Numerics(weights, products, cuda).record(recorder):
            torch.set_default_dtype(weights)  # as Lightning does
            total = model(ids, targets, loss=loss).loss
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
    kinds, amounts = torch.tensor([event for segment in recorder.segments for event in segment]).T
    ends = tuple(itertools.accumulate(len(segment) for segment in recorder.segments))
    return Trace(kinds, amounts, ends, frozenset(recorder.operators), recorder.operations)


def _begin_backward(recorder: Recorder) -> None:
    recorder.begin()
    recorder.kind = ACTIVATIONS


def _of_length(step: Step, length: int) -> Step:
    return replace(step, settings=replace(step.settings, length=length))


# -- short sequences --------------------------------------------------------------------------------------------------


def _from_short_sequences(step: Step) -> MicroBatch:
    """A micro-batch of a module that takes too many operations, from more and shorter sequences with as many tokens.

    With the number of tokens fixed, a figure is a + b·T + c/T: what grows with tokens or is constant, attention, and states of
    a recurrence. Lengths u, 2u and 3u determine it, and 4u tests it.
    """
    many = f"it takes more than {MOST_OPERATIONS:,} operations"
    try:
        per_token = (trace(_of_length(step, 16), 2).operations - trace(_of_length(step, 8), 2).operations) / 8
        unit = min(step.whole_length // 8, max(4, int(MOST_OPERATIONS / 20 / max(per_token, 1))))
        found = [_extended(step, step.tokens / (i * unit), i * unit) for i in (1, 2, 3, 4)]
    except TooManyOperations:
        return _unknown(step, f"{many} for a few tokens")
    except Undetermined as reason:
        return _unknown(step, f"{many}, and {reason}")
    made = [each[0] for each in found if each is not None]
    lengths = [unit, 2 * unit, 3 * unit]
    if len(made) < 4 or not _are_near(_at(4 * unit, lengths, made[:3]), made[3]):
        return _unknown(step, f"{many}, and its figures for short sequences do not show those for long ones")
    note = (
        f"memory and FLOPs follow from sequences of {unit} to {3 * unit} tokens, because those of {step.whole_length:,} take "
        f"more than {MOST_OPERATIONS:,} operations"
    )
    operators = found[0][1].operators if found[0] else frozenset[str]()
    return replace(_at(step.whole_length, lengths, made[:3]), notes=(note, *_of_kernels(step, operators)))


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
        figure([made.written for made in known]),
        figure([made.matmul_flops for made in known]),
        figure([made.attention_flops for made in known]),
        tuple(
            Operation(of[0].phase, of_kinds([each.live for each in of]), figure([each.flops for each in of]))
            for of in zip(*(made.timeline for made in known), strict=True)
        ),
        kernels=figure([made.kernels for made in known]),
    )
