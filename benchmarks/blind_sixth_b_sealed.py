"""The sixth exam of `doctor`, author b, sealed half: 8 faults by somebody who had not read the doctor."""

from __future__ import annotations

from typing import Any

import torch
from blind_injections import FAULTS, after_step, fault, in_order, model_built, replace

from lit_llm.callbacks import Cosine
from lit_llm.models.experts import Experts
from lit_llm.training.language_model import LanguageModel

_BEFORE = frozenset(FAULTS)


@fault(
    "scheduler_in_micro_batches",
    "a",
    "schedule",
    "the scheduler is stepped at every micro-batch, four times per optimizer step, so the rate has decayed to its end at a "
    "quarter of the run",
    "the learning rate is 0 (or at its minimum) far too early",
    "the schedule is shorter than the run",
    wrong="the model has converged",
    setup="--data.micro_batch_size 2",
    place=replace(Cosine, "rate"),
)
def _(original: Any, self: Any, t: int, peak: float) -> Any:
    return original(self, 4 * t, peak)


fault(
    "average_too_slow",
    "a",
    "evaluation",
    "the weights that are evaluated are a moving average over 1000 steps, which in this short run is still mostly the initial "
    "weights",
    "EMA decay is too large for the length of the run",
    "validation uses averaged weights that lag far behind those trained",
    wrong="overfitting",
    flags="--ema EMA --ema.decay 0.999 --ema.warmup false",
)


@fault(
    "outputs_of_other_tokens",
    "a",
    "experts",
    "outputs of the experts are not put back into the order of the tokens, so each token gets those of another one",
    "wrong permutation after the experts",
    "tokens are scattered back to the wrong places",
    wrong="the experts are not balanced",
    setup="MOE",
    place=replace(Experts, "forward"),
)
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)
    y, *rest = found if isinstance(found, tuple) else (found,)
    order = torch.randperm(y.numel() // y.size(-1), generator=torch.Generator().manual_seed(5))
    mixed = y.flatten(0, -2)[order].view_as(y)
    return (mixed, *rest) if rest else mixed


fault(
    "large_epsilon",
    "b",
    "optimizer",
    "Adam's epsilon is 0.01, larger than the square root of the second moment, so updates are much smaller than the rate says",
    "eps of the optimizer is too large",
    "updates are not normalised any more: Adam works like SGD with a small rate",
    wrong="the learning rate is too low",
    flags="--optimizer.eps 1e-2",
)


@fault(
    "zeroed_in_micro_batches",
    "b",
    "accumulation",
    "gradients are set to zero before every micro-batch, so each step has the gradient of the last micro-batch only",
    "accumulation has no effect: the effective batch is one micro-batch",
    "zero_grad is called inside the accumulation loop",
    wrong="the learning rate is too high",
    setup="--data.micro_batch_size 1",
    place=replace(LanguageModel, "backward"),
)
def _(original: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    self.zero_grad(set_to_none=True)
    original(self, loss, *args, **kwargs)


@fault(
    "embedding_of_unit_variance",
    "c",
    "initialisation",
    "the token embedding, which is also the output matrix, starts with the standard deviation 1 of torch's default",
    "the tied embedding is initialised too large",
    "the first loss is far above log(vocabulary), because the initial logits are too large",
    wrong="the learning rate is too high",
    place=model_built,
)
def _(gpt: Any) -> None:
    gpt.embedding.weight.normal_(0, 1)


@fault(
    "weights_in_bf16",
    "c",
    "precision",
    "the weights themselves are kept in bf16 without an fp32 copy, so most updates at this small rate are rounded away",
    "no fp32 master weights",
    "updates are lost in the rounding of bf16 weights",
    wrong="the learning rate is too low",
    setup="--init_from @/base-KIND --data TextFiles --data.global_batch_size 8 --data.tokenizer TokenizerJSON "
    "--data.tokenizer.path @/base-KIND/tokenizer.json "
    "--data.train @/prose.txt --data.val @/prose-val.txt --optimizer.lr 1e-4",
    place=after_step,
)
def _(module: Any, optimizer: Any) -> None:
    for p in module.parameters():
        p.copy_(p.bfloat16())


@fault(
    "first_blocks_only",
    "c",
    "loader",
    "the loader starts again at the beginning after a few batches, so the run sees only a small part of the data over and over",
    "the same few sequences are repeated",
    "overfitting, because most of the data are never read",
    wrong="too little data was given",
    place=in_order,
)
def _(g: Any, samples: int, at: Any) -> Any:
    return g % min(40, samples)


NAMES = frozenset(FAULTS) - _BEFORE
