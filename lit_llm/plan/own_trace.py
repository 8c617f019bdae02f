"""The memory and FLOPs of a micro-batch of a user's module, traced as a whole.

The module may have any structure: its forward pass, the training loss and the backward pass run once, on tensors without data.
Sizes are linear in the number of sequences, so traces of 2 and 3 sequences give the sizes for any number of sequences.

The memory of activations is unknown, and a note says why, if operations depend on values of tensors, if torch cannot compute an
operator's sizes without data, or if the module takes more than MOST_OPERATIONS operations, as in a loop over positions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from contextlib import redirect_stdout
from dataclasses import replace

import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.distributed.activation_checkpointing import recompute_block, recomputes
from lit_llm.models.loss import LossSums, cross_entropy_of_logits
from lit_llm.plan.built_model import build_own, place, said
from lit_llm.plan.kernels import CudaKernels
from lit_llm.plan.recorder import Recorder, Undetermined
from lit_llm.plan.segments import (
    ACTIVATIONS,
    GRADIENTS,
    LOSS_HEAD,
    Bytes,
    Change,
    GatheredWeights,
    MicroBatch,
    Segment,
    Step,
    extended,
)
from lit_llm.plan.trace import batch_without_data, dtypes, recorded, without_data
from lit_llm.plan.weights import OwnModel, cached_by_text, weights_of

Trace = tuple[list[Segment], set[str]]
"""(four lists of events: the module's forward, the loss's forward, the loss's backward and the module's backward; names of the
operators that ran)."""
PHASES = ("forward", "loss head", "loss head", "backward")
MOST_OPERATIONS = 50_000
"""The most operations of a traced micro-batch; so many take about two seconds. A Transformer of 80 layers has 15,000."""
_ON_GPU = {  # operators whose GPU kernels need an unknown amount of memory
    "mkldnn_rnn_layer": "LSTM layers are counted as on a CPU: what cuDNN's keep for the backward pass is not known",
    "convolution": "work memory of cuDNN's convolutions is not counted",
}


def micro_batch_of_own(step: Step) -> MicroBatch:
    """Return memory and FLOPs of a micro-batch of a user's module (`OwnModel`). If the module cannot be traced, only the memory
    of the gradients is counted, and a note says so."""
    try:
        if step.sequences > 3:
            (few, operators), (more, _) = trace(step, 2), trace(step, 3)
            if (segments := extended(few, more, step.sequences - 2)) is not None:
                return _play(step, segments, operators)
        return _play(step, *trace(step, step.sequences))  # few sequences, or the traces of 2 and 3 differ
    except Undetermined as reason:
        note = f"the memory of activations is unknown: {_own(step).architecture.class_path} cannot be traced, because {reason}"
        _, gradients = replace(step, gradients_exist=False).gradients(weights_of(step.settings.model))
        return MicroBatch({"backward": {"gradients": gradients}}, notes=(note,), is_known=False)


def _own(step: Step) -> OwnModel:
    assert isinstance(step.settings.model, OwnModel)
    return step.settings.model


# -- one trace --------------------------------------------------------------------------------------------------------


def _play(step: Step, segments: Sequence[Segment], operators: Set[str]) -> MicroBatch:
    """Return the memory and FLOPs of the micro-batch whose segments, in the order of PHASES, are the event lists `segments`.

    Assumption: FSDP2 holds the largest block gathered all the time, and that block's gradients during the whole backward pass.
    """
    weights, exist = weights_of(step.settings.model), step.gradients_exist
    gathered = GatheredWeights(step, weights)
    gradients = gathered.gradients + gathered.root_gradients + gathered.sent
    beside = {
        "forward": gathered.forward(0),
        "loss head": gathered.forward(gathered.blocks),
        "backward": Bytes(gathered.forward(0).own + gradients, gathered.forward(0).sent),
    }
    batch = MicroBatch(notes=tuple(note for operator, note in _ON_GPU.items() if step.cuda and operator in operators))
    kind, earlier = step.gradients(weights)
    batch.live[ACTIVATIONS], batch.live[kind] = step.ids_bytes, earlier
    for i, (phase, segment) in enumerate(zip(PHASES, segments, strict=True)):
        if i == len(PHASES) // 2 and not exist:  # zero_grad, between forward and backward
            batch.live[GRADIENTS] -= earlier
        change = Change.of(segment, lambda gradient: (0 if exist else step.own_part(gradient), 0))
        batch.play(phase, change, beside[phase])
    return batch


def trace(step: Step, sequences: int) -> Trace:
    """Trace a micro-batch of `sequences` sequences of the step's length. Return the events and the operators' names (`Trace`).

    Raises:
        Undetermined: the module depends on values of tensors, takes too many operations, or fails.
        UserError: the module breaks the rules for custom models (`lit_llm.models.custom`).
    """
    result = cached_trace(step.traced(sequences))
    if isinstance(result, Exception):
        raise result
    return result


@cached_by_text
def cached_trace(step: Step) -> Trace | Exception:
    """Return the trace of the micro-batch `step`, or the exception that `trace` raises instead."""
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
        return cross_entropy_of_logits(z, targets, z_loss=step.settings.loss.z_loss)

    default = torch.get_default_dtype()
    try:
        with redirect_stdout(sys.stderr), recorded(step, recorder):
            torch.set_default_dtype(dtypes(step)[0])  # as Lightning does
            total = module(ids, targets, loss=loss).loss
            recorder.begin()
            torch.autograd.backward(total)
            del total
    except UserError as error:
        return error.with_traceback(None)
    except Undetermined as reason:
        return Undetermined(f"{reason}{place(reason)}")
    except Exception as error:  # the user's code may raise any exception
        return Undetermined(f"it fails on tensors without data: {said(error)}")
    finally:
        torch.set_default_dtype(default)
    return recorder.copied(), recorder.operators
