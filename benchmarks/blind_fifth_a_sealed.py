"""The fifth exam of `doctor`, author a, sealed half: 15 faults by somebody who had not read the doctor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from blind_injections import FAULTS, batches, fault, fire, gradients, model_built, replace
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lit_llm.callbacks import Cosine
from lit_llm.models.router import Router
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.training.language_model import LanguageModel

_BEFORE = frozenset(FAULTS)


@fault(
    "only_last_micro_batch",
    "a",
    "accumulation",
    "Gradients are cleared before each micro-batch, so only the last of eight counts in a step.",
    "zero_grad is called within the accumulation",
    "the effective batch is one micro-batch: accumulation does not add gradients",
    "accumulation of gradients is broken, so the gradient is as noisy as that of one sequence",
    wrong="The learning rate is too high.",
    setup="--data.micro_batch_size 1",
)
def _() -> None:
    @replace(LanguageModel, "backward")
    def backward(original: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None
        original(self, loss, *args, **kwargs)


fault(
    "tight_spike_guard",
    "a",
    "optimizer",
    "The spike guard is far too tight: it takes ordinary steps for spikes and skips a large part of them.",
    "spike_guard.sigma is too small",
    "many optimizer steps are skipped although loss and gradients are healthy",
    "updates are thrown away by the spike guard's threshold",
    wrong="The data have many bad batches, or training is unstable.",
    flags="--spike_guard.sigma 0.1",
)


@fault(
    "convolution_sees_ahead",
    "a",
    "model",
    "The short convolution is centred instead of causal, so a position sees the next token, which it shall predict.",
    "the model sees the future: targets leak into the inputs",
    "the convolution pads both sides",
    "causality is violated, so the loss is too good to be true",
    wrong="Validation text is part of the training text.",
)
def _() -> None:
    @replace(ShortConvolution, "forward")
    def forward(original: Any, self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        added = original(self, x, *args, **kwargs) - x
        return x + F.pad(added, (0, 0, 0, 1))[:, 1:]


@fault(
    "schedule_per_micro_batch",
    "a",
    "schedule",
    "The schedule counts micro-batches instead of optimizer steps, so the rate is zero after a quarter of the run.",
    "the learning rate decays four times too fast",
    "the scheduler is stepped at every micro-batch under accumulation",
    "the learning rate ends long before the run",
    wrong="The model has converged.",
    setup="--data.micro_batch_size 2",
)
def _() -> None:
    @replace(Cosine, "rate")
    def rate(original: Any, self: Any, t: int, peak: float) -> float:
        return original(self, 4 * t, peak)


@fault(
    "scored_without_context",
    "a",
    "evaluation",
    "Validation cuts the text into pieces of twelve tokens and scores each without what came before.",
    "the evaluation gives the model too little context",
    "validation has shorter sequences than training, so its loss is too high",
    "validation is measured otherwise than training: the model itself is fine",
    wrong="Overfitting.",
    place=batches("val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    for name in ("input_ids", "targets"):
        batch[name] = batch[name].reshape(-1, 12)


@fault(
    "old_copy_on_second_rank",
    "b",
    "ranks",
    "The second rank reads an old copy of the data, whose ids are three higher because of other special tokens.",
    "the ranks have different data: one was tokenised otherwise",
    "the data of rank 1 are corrupt or outdated",
    "one rank trains on ids of another vocabulary",
    wrong="The gradients of the ranks are not synchronised.",
    ranks=2,
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    fire("second rank")  # the first one is asked
    if rank == 1:
        for ids in batch.values():
            ids.copy_(torch.where(ids >= 0, (ids + 3) % 257, ids))


fault(
    "small_alpha",
    "b",
    "LoRA",
    "alpha of LoRA is far too small, so the adapters hardly change the output.",
    "lora.alpha / rank scales the updates to almost nothing",
    "the scale of the adapters is wrong",
    "the adapters have too little effect to learn the chats",
    wrong="The rank of the adapters is too small.",
    setup="CHAT --lora.rank 8 --lora.alpha 16",
    flags="--lora.alpha 0.05",
)


@fault(
    "unscaled_8bit_gradients",
    "b",
    "precision",
    "Gradients are rounded to 8-bit floats without a scale, so small ones become zero.",
    "gradients underflow in a low precision",
    "no loss scaling: small gradients are flushed to zero",
    "the precision of the gradients is too low: many are exactly zero",
    wrong="The gradients vanish because of the architecture or the initialisation.",
    place=gradients,
)
def _(module: Any, at: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(torch.float8_e4m3fn))


@fault(
    "gradients_never_zeroed",
    "b",
    "accumulation",
    "Gradients are never cleared: each step adds its own to those of all steps before.",
    "zero_grad is missing",
    "gradients accumulate over optimizer steps, so their norm only grows",
    "stale gradients of earlier steps are still in the sum",
    wrong="The gradients explode because the learning rate is too high.",
)
def _() -> None:
    kept: dict[Any, Tensor] = {}

    @gradients
    def add(module: Any, at: float) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                if parameter in kept:
                    parameter.grad += kept[parameter]
                kept[parameter] = parameter.grad.clone()


@fault(
    "capacity_too_small",
    "b",
    "experts",
    "The capacity of the experts is far too small, so most tokens are dropped and pass no expert.",
    "the capacity factor is too low",
    "tokens above an expert's capacity get no output of the MLP",
    "most tokens are dropped by the experts",
    wrong="The router has collapsed onto few experts.",
    setup="MOE",
)
def _() -> None:
    @replace(Router, "forward")
    def forward(original: Any, self: Any, x: Tensor) -> Any:
        routing = original(self, x)
        tokens, k = routing.experts.shape
        chosen = F.one_hot(routing.experts.flatten(), self.config.experts)  # (N k, E)
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=1).view(tokens, k)  # from 1, in the queue of its expert
        fits = place <= 0.15 * tokens * k / self.config.experts
        return routing._replace(weights=routing.weights * fits)


@fault(
    "ranks_left_unsynced",
    "c",
    "ranks",
    "The ranks do not exchange gradients: no_sync was left on, so each trains a model of its own on its half of the batch.",
    "gradients are not reduced over ranks",
    "the weights of the ranks drift apart",
    "DDP does not synchronise, so the effective batch is that of one rank",
    wrong="The learning rate is too high for the batch size.",
    ranks=2,
)
def _() -> None:
    @replace(DistributedDataParallel, "forward")
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return original(self, *args, **kwargs)


@fault(
    "unit_normal_embedding",
    "c",
    "initialisation",
    "The embedding, which is the head too, starts with a deviation of 1 instead of 0.02, so the first logits are huge.",
    "torch's default initialisation of the embedding was left",
    "the initial loss is far above that of a uniform guess: the initial weights are too large",
    "init_std of the embedding is too large",
    wrong="The learning rate is too high.",
    place=model_built,
)
def _(gpt: Any) -> None:
    gpt.embedding.weight.normal_()
    gpt.positions.weight.normal_()


@fault(
    "dropout_in_validation_5a",
    "c",
    "evaluation",
    "Dropout is active in validation: the model is not switched to evaluation.",
    "model.eval() is missing",
    "validation is computed in training mode",
    "validation loss is too high, because activations are dropped",
    wrong="Overfitting.",
    setup="--model.dropout 0.2",
)
def _() -> None:
    @replace(LanguageModel, "validation_step")
    def validation_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.train()
        result = original(self, *args, **kwargs)
        self.model.eval()
        return result


@fault(
    "answer_begins_late",
    "c",
    "masks",
    "The mask of the answers begins one token late, so the first token of an answer is never learned.",
    "off by one in the loss mask of the chats",
    "the start of the answers is not trained, but validation counts it",
    "training ignores the first target of each answer",
    wrong="Overfitting to the training chats.",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    counted = batch["targets"] != -100
    first = counted & ~F.pad(counted, (1, 0))[:, :-1]
    batch["targets"][first] = -100


fault(
    "decay_hundredfold",
    "c",
    "optimizer",
    "Weight decay is a hundred times too strong and keeps the weights small.",
    "optimizer.weight_decay is far too large",
    "the weights shrink, because the decay outweighs the gradients",
    "too much regularisation by weight decay",
    wrong="The learning rate is too low.",
    flags="--optimizer.weight_decay 10",
)

NAMES = frozenset(FAULTS) - _BEFORE
