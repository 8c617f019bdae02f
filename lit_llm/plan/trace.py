"""Trace allocations, releases and FLOPs of a micro-batch: the real model and loss run forward and backward without data.

The body (the model without the output matrix and the loss) and the loss head (output matrix and loss) are traced separately, so
that one trace of the body serves every chunk size, and one trace of the head every mode of activation checkpointing. The body's
trace counts the allocation of the last hidden states, the head's trace their release. The head's trace counts the allocation of
the gradients of the hidden states and of the output matrix, the body's trace their release.

Weights, buffers and the batch are not counted. A gradient of a parameter is freed at once and becomes an event GRADIENTS,
because it depends on the run how many of its bytes stay: all, a shard, or none if the gradient is added to an earlier one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lit_llm.core._torch import gradients_of_inputs, put_tensor
from lit_llm.core.memory import without_garbage_collection
from lit_llm.distributed.activation_checkpointing import recompute_block, recomputes
from lit_llm.distributed.tensor_parallel_sizes import local_config, share_experts, split_positions
from lit_llm.models.distillation_loss import TeacherLogits
from lit_llm.models.loss import LossSums, chunked_cross_entropy, cross_entropy, token_nll
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.plan.built_model import build_gpt, with_layers
from lit_llm.plan.kernels import CudaKernels, keep_as_compiled
from lit_llm.plan.recorder import Recorder, Sized, sized
from lit_llm.plan.segments import ACTIVATIONS, GRADIENTS, LOSS_HEAD, Segment, Step
from lit_llm.plan.weights import cached_by_text

TEACHER_IDS = 64
"""Assumed number of token ids for which a teacher gives logits at each position: the default of `prepare --top_k`."""


def dtypes(step: Step) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype of weights, dtype of matrix products) of a step. 16-bit floats count as bfloat16."""
    wide, narrow = ({4: torch.float32, 2: torch.bfloat16}[size] for size in step.settings.sizes)
    return wide, narrow


@contextmanager
def recorded(step: Step, recorder: Recorder) -> Iterator[None]:
    """Let `recorder` record the operations of the `with` block, in the precision and with the kernels of `step`."""
    wide, narrow = dtypes(step)
    precision = torch.autocast("cpu", narrow, enabled=wide != narrow, cache_enabled=False)
    kernels = CudaKernels() if step.cuda else nullcontext()
    # Selective recomputation leaves reference cycles, which keep tensors until Python collects them: rarely within a step.
    with without_garbage_collection(), recorder, precision, kernels, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Body:
    """Record of the trace of the model's forward and backward pass without the output matrix and the loss.

    Attributes:
        segments: lists of events. First the forward pass: embedding, each block, last norm. Then the backward pass, in the
            order of execution: last norm, last block, …, first block, embedding. For each further predicted token, both passes
            have two more segments, of a block and of a norm, which in the forward pass follow the last norm.
        hidden_dtype: dtype of the hidden states that the loss gets.
        head_is_trainable: whether the loss computes a gradient of the output matrix.
    """

    segments: list[Segment]
    hidden_dtype: torch.dtype
    head_is_trainable: bool

    @property
    def passes(self) -> tuple[list[Segment], list[Segment]]:
        """`segments` as (lists of events of the forward pass, lists of events of the backward pass)."""
        half = len(self.segments) // 2
        return self.segments[:half], self.segments[half:]


@cached_by_text
def trace_body(step: Step, layers: Sequence[int], *, split: bool = False) -> Body:
    """Return the trace of a model that has only the given `layers` of the step's model, in this order.

    Args:
        step: a step with only the settings that a trace depends on (`Step.traced`).
        split: whether the backward pass computes only the gradients of the blocks' inputs, and keeps the tensors from which the
            gradients of weights are computed later.
    """
    settings, config = step.settings, step.settings.gpt
    checkpointing, compiled = settings.compute.activation_checkpointing, settings.compute.compile
    tensor_parallel = settings.layout.tensor_parallel
    model = build_gpt(local_config(with_layers(config, layers), tensor_parallel), settings.lora)
    share_experts(model, settings.layout.expert, tensor_parallel)
    recorder = Recorder(cuda=step.cuda)
    for block, layer in zip(model.blocks, (*layers, *range(config.n_layer, config.n_blocks)), strict=True):
        if step.cuda:
            for module in (block.attention, block):
                CudaKernels.around(module)  # type: ignore[arg-type]
        recomputed = recomputes(checkpointing, layer)
        if recomputed and not (compiled and checkpointing == "cheap"):
            recompute_block(block, checkpointing, preserve_rng_state=False)
        if compiled and (not recomputed or checkpointing in ("cheap", "attention")):
            keep_as_compiled(block, recorder, inputs=checkpointing != "cheap")
    if tensor_parallel > 1:
        split_positions(model, tensor_parallel)
    if settings.layout.context > 1:
        model.sequence_shard = SequenceShard("context", settings.layout.context, 0, settings.layout.context_attention)
    without_data(model, dtypes(step)[0], recorder)
    ids, targets = batch_without_data(step, recorder)
    given: dict[str, Tensor] = {}
    if config.mask_documents and config.eos_id is None:  # the data know where documents end, by an id or otherwise
        given["documents"] = sized(*ids.shape, dtype=torch.int32)
        recorder.exclude(given.values())
    received: list[Tensor] = []

    def receive(module: nn.Module, inputs: Any) -> None:
        if split:
            received.append(inputs[0] if inputs[0].requires_grad else inputs[0].requires_grad_())
        _mark(recorder, inputs[0])

    model.blocks[0].register_forward_pre_hook(receive)
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, inputs, output: _mark(recorder, output[0] if isinstance(output, tuple) else output)
        )
    seen: list[Any] = []

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> LossSums:
        seen.append((hidden.dtype, weight.requires_grad))
        hidden = hidden.reshape(-1, hidden.size(-1))  # as the loss does, with a copy if positions were padded
        is_last = len(seen) > config.predict_ahead
        loss = _Head.apply(hidden, weight.detach() if split else weight, recorder, is_last)
        recorder.hand_over(hidden)
        recorder.begin()  # "backward"
        return LossSums(loss, loss, loss)

    with recorded(step, recorder):
        loss = model(ids, targets, loss=head, **given).loss
        if split:
            _kept = gradients_of_inputs([loss], received, model.parameters())  # not released here
        else:
            torch.autograd.backward(loss)
        segments = recorder.copied()
    missing = 2 * (len(layers) + 2 + 2 * config.predict_ahead) - len(segments)  # frozen weights get no gradients
    return Body(segments + [[] for _ in range(missing)], *seen[0])


@cached_by_text
def trace_head(
    step: Step, rows: int, chunk_size: int | None, *, hidden_dtype: torch.dtype, trainable: bool, split: bool = False
) -> list[Segment]:
    """Trace the loss of `rows` tokens. Return a list of events for the forward pass and one for the backward pass.

    Args:
        step: a step with only the settings that a trace depends on (`Step.traced`).
        chunk_size: rows of a chunk of the loss. None: `cross_entropy`, which computes all logits at once.
        hidden_dtype, trainable: `hidden_dtype` and `head_is_trainable` of the `Body`.
        split: whether the backward pass has two lists: the gradient of the hidden states, and the release of all tensors that
            the gradient of the output matrix does not need.
    """
    recorder, config = Recorder(cuda=step.cuda), local_config(step.settings.gpt, step.settings.layout.tensor_parallel)
    recorder.kind, d = LOSS_HEAD, config.n_embd
    hidden_leaf = sized(rows, d, dtype=hidden_dtype, requires_grad=True)
    weight_leaf = sized(config.padded_vocab_size, d, dtype=dtypes(step)[0], requires_grad=trainable)
    targets = sized(rows, dtype=torch.int64)
    recorder.exclude((hidden_leaf, weight_leaf, targets))
    recorder.weights.add(id(weight_leaf.meta.untyped_storage()))
    assert config.vocab_size is not None
    loss: Callable[..., LossSums | Tensor] = cross_entropy
    options: dict[str, Any] = {"vocab_size": config.vocab_size, "softcap": config.logit_softcap}
    if chunk_size is not None:
        loss, options["chunk_size"] = chunked_cross_entropy, chunk_size
    if step.settings.loss_head == "by document":
        loss = token_nll
    elif step.settings.loss_head == "with a teacher":
        ids, logp = (sized(rows, TEACHER_IDS, dtype=dtype) for dtype in (torch.int64, torch.float16))
        recorder.exclude((ids, logp))
        options["teacher"] = TeacherLogits(ids, logp, 1.0, 0.5)
    else:
        options["z_loss"] = step.settings.loss.z_loss
    with recorded(step, recorder):
        if split:
            hidden, weight = recorder.receive((rows, d), hidden_dtype, ACTIVATIONS).requires_grad_(), weight_leaf
        else:
            hidden, weight = _Received.apply(hidden_leaf, weight_leaf, recorder)
        result = loss(hidden, weight, targets, **options)
        total = result.loss if isinstance(result, LossSums) else result.sum()
        received, graph = [hidden] if split else [], total.grad_fn if split else None
        del hidden, weight
        recorder.begin()
        if split:
            _kept = gradients_of_inputs([total], received, [weight_leaf])
            recorder.begin()
            del graph
        else:
            torch.autograd.backward(total)
        del result, total
        return recorder.copied()


def batch_without_data(step: Step, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """Return (ids, targets) of a micro-batch as tensors without data. `recorder` does not count their memory."""
    ids, targets = (sized(step.sequences, step.settings.sequence_length, dtype=torch.int64) for _ in range(2))
    recorder.exclude((ids, targets))
    return ids, targets


def without_data(model: nn.Module, dtype: torch.dtype, recorder: Recorder) -> None:
    """Replace parameters and buffers of `model` by tensors without data, and record each gradient as an event GRADIENTS."""
    if dtype != torch.float32:
        model.to(dtype)
    copies: dict[int, Sized] = {}
    for module in model.modules():
        own: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        own += module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in own:
            if id(tensor) not in copies:
                copies[id(tensor)] = sized(*tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            put_tensor(module, name, copies[id(tensor)])
            if isinstance(tensor, nn.Parameter):
                recorder.weights.add(id(copies[id(tensor)].meta.untyped_storage()))
    recorder.exclude(copies.values())
    for tensor in copies.values():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(partial(_accumulated, recorder))


def _accumulated(recorder: Recorder, parameter: Tensor) -> None:
    assert parameter.grad is not None
    size = parameter.grad.numel() * parameter.grad.element_size()
    parameter.grad = None
    recorder.add(GRADIENTS, size)


def _mark(recorder: Recorder, stream: Tensor) -> None:
    """Begin a segment of the forward pass now, and one of the backward pass when the hidden states `stream` get a gradient."""
    recorder.begin()
    if stream.requires_grad:
        stream.register_hook(lambda gradient: recorder.begin())


class _Head(Function):
    """Autograd function in place of the loss in the body's trace. Its gradients' allocations are counted by `trace_head`.

    If there are several losses, the last loss runs backward first, and returns a gradient of the output matrix. Autograd adds
    the gradients of the other losses to it in place, so `backward` of the other losses only releases their gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, recorder: Recorder, is_last: bool) -> Tensor:
        ctx.recorder, ctx.is_last, ctx.of = recorder, is_last, [(tuple(x.shape), x.dtype) for x in (hidden, weight)]
        return recorder.receive((1,), torch.float32, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.is_last:
            ctx.recorder.begin()
        of_hidden, of_weight = (
            ctx.recorder.receive(shape, dtype, LOSS_HEAD) if needed else None
            for (shape, dtype), needed in zip(ctx.of, ctx.needs_input_grad[:2], strict=True)
        )
        return of_hidden, of_weight if ctx.is_last else None, None, None


class _Received(Function):
    """Autograd function in place of the body in the head's trace: records the release of `hidden`, but not of gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, recorder: Recorder) -> tuple[Tensor, Tensor]:
        ctx.recorder = recorder
        ctx.set_materialize_grads(False)
        passed = weight.view_as(weight)
        if not ctx.needs_input_grad[1]:  # frozen: the loss computes no gradient of it
            ctx.mark_non_differentiable(passed)
        return recorder.receive(hidden.shape, hidden.dtype, ACTIVATIONS), passed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        for gradient in gradients:
            if gradient is not None:
                ctx.recorder.hand_over(gradient)
        return None, None, None
