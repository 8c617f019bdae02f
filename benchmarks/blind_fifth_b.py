"""The fifth exam of `doctor`, second author: the development half."""

from __future__ import annotations

from typing import Any

import torch
from blind_injections import (
    FAULTS,
    batches,
    fault,
    gradients,
    model_built,
    parameters,
    replace,
)
from torch import Tensor

from lit_llm.callbacks import Cosine
from lit_llm.models.block import Block
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)

# fmt: off

# -- kind a ----------------------------------------------------------------------------------------------------------------


@fault("mlp-starts-at-zero", "a", "initialisation",
    "Both matrices of every MLP start at zero, so neither ever gets a gradient and the MLPs never learn.",
    "the MLP blocks are dead from the start", "the input matrix of the MLP starts at zero beside the zero projection",
    "the weights of the MLPs do not move because their gradient is exactly zero",
    wrong="The learning rate is too low, or the model is too small.",
    place=model_built)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        for matrix in (block.mlp.up, block.mlp.gate, block.mlp.project):
            if matrix is not None:
                matrix.weight.zero_()


@fault("answers-ignored", "a", "chats",
    "The loss mask is inverted in training: the user's turns are learned, and the assistant's answers are ignored.",
    "training learns the questions and not the answers", "the mask of the chat's targets marks the wrong turns",
    "the tokens that count in training are not those that count in validation",
    wrong="The model overfits the few conversations, or the learning rate is too high.",
    setup="CHAT",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets, documents = batch["input_ids"], batch["targets"], batch["documents"]
    follows = torch.zeros_like(targets, dtype=torch.bool)
    follows[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] < documents.size(1))
    batch["targets"][:] = torch.where((targets == -100) & follows, ids.roll(-1, dims=1), -100)


fault("muon-rate-of-adamw", "a", "optimizer",
    "The learning rate of Muon's matrices is far too low: a rate for AdamW was given to Muon.",
    "the learning rate is too low", "optimizer.lr is about thirty times too small for Muon", "the matrices hardly move",
    wrong="The model is too small, or the data are too hard.",
    flags="--optimizer.lr 3e-4")


fault("wrong-training-folder", "a", "data",
    "The training text is of another kind than the validation text: training reads prose, validation reads code.",
    "the training data are the wrong ones", "training and validation text come from different distributions",
    "domain mismatch between train and val",
    wrong="The model overfits because it is too large or trains for too long: fewer steps or more regularisation.",
    flags="--data.train @/prose.txt")


@fault("pairs-swapped", "a", "preferences",
    "Chosen and rejected answers are swapped in training, so it learns to prefer the rejected ones.",
    "the labels of the preferences are the wrong way round", "training prefers the rejected answers",
    "the sign of the preference loss is wrong in training",
    wrong="The rate or beta is too high, so the policy drifts too far from its reference.",
    setup="PAIRS")
def _() -> None:
    @replace(Preference, "of_documents")
    def of_documents(original: Any, self: Any, logp: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Any:
        def swapped(values: Tensor) -> Tensor:
            return values.unflatten(1, (-1, 2)).flip(-1).flatten(1)

        if not torch.is_grad_enabled():
            return original(self, logp, tokens, reference)
        return original(self, swapped(logp), swapped(tokens), None if reference is None else swapped(reference))


# -- kind b ----------------------------------------------------------------------------------------------------------------


@fault("scheduler-per-micro-batch", "b", "schedule",
    "The schedule advances with each micro-batch, not with each optimizer step, so the rate has decayed after a quarter of the "
    "run.",
    "the learning rate decays four times too early", "the schedule ends long before the run does",
    "scheduler.step is called for every micro-batch of the accumulation",
    wrong="The model has converged, and needs no more steps.",
    setup="--data.micro_batch_size 2")
def _() -> None:
    @replace(Cosine, "rate")
    def rate(original: Any, self: Any, t: int, peak: float) -> float:
        return original(self, 4 * t, peak)


@fault("gradients-never-cleared", "b", "optimizer",
    "Gradients are not set to zero between steps, so each update uses the sum of all gradients so far.",
    "zero_grad is missing", "gradients accumulate over optimizer steps", "stale gradients are added to the new ones",
    wrong="The learning rate is too high and should only be lowered.")
def _() -> None:
    held: dict[Tensor, Tensor] = {}

    @gradients
    def add(module: Any, at: float) -> None:
        for p in parameters(module):
            held[p] = p.grad.clone() if p not in held else held[p] + p.grad
            p.grad.copy_(held[p])


@fault("pad-is-newline", "b", "masks",
    "Line breaks are never targets in training, because the mask of padding takes the line break for the padding token.",
    "the padding token is one that the text has, so its targets are ignored", "newlines are masked out of the training loss",
    "one frequent token is never learned", "some real targets are ignored in training, but count in validation",
    wrong="The model overfits the training text: the validation loss is higher for that reason.",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"].masked_fill_(batch["targets"] == ord("\n"), -100)


@fault("no-residual-around-mlp", "b", "model",
    "The MLPs have no residual connection: their output replaces the stream of the block.",
    "a skip connection is missing", "the residual around the MLP was forgotten", "x = mlp(norm(x)) instead of x + mlp(norm(x))",
    wrong="The learning rate is wrong, or the initial weights are too small.",
    setup="--model.zero_init_projections false")
def _() -> None:
    is_mlp = False  # of the next sum: each block adds the attention, then the MLP

    @replace(Block, "_add")
    def _add(original: Any, self: Any, x: Tensor, branch: Tensor) -> Tensor:
        nonlocal is_mlp
        total = branch if is_mlp else original(self, x, branch)
        is_mlp = not is_mlp
        return total


@fault("last-micro-batch-only", "b", "accumulation",
    "Only the last micro-batch of each step contributes to the gradient: the gradients are cleared between micro-batches.",
    "accumulation is broken, so the effective batch is one micro-batch", "zero_grad is called inside the accumulation loop",
    "seven eighths of each batch are thrown away", "the gradient is much noisier than the batch size says",
    wrong="The learning rate is too high: that is the cause of the noise.",
    setup="--data.micro_batch_size 1")
def _() -> None:
    @replace(LanguageModel, "backward")
    def backward(original: Any, self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        original(self, loss if self.window.is_last else loss * 0, *args, **kwargs)


# -- kind c ----------------------------------------------------------------------------------------------------------------


fault("epsilon-too-large", "c", "optimizer",
    "AdamW's epsilon is far too large beside the gradients, so that updates are much smaller than the rate says.",
    "optimizer.eps is too high", "eps dominates the denominator of Adam", "the effective step is too small because of epsilon",
    wrong="The gradients vanish in the model, or the model is too small.",
    flags="--optimizer.eps 1e-2")


@fault("schedule-restarts", "c", "resume",
    "The schedule starts again after the resume, with another warmup, so the run ends at a rate that should have decayed.",
    "the step of the scheduler was not restored", "the learning rate jumps at the resume and never decays to its end",
    "the learning-rate schedule was reset when the run was resumed",
    wrong="The optimizer's moments were lost, or the data repeat after the resume.",
    resumed=True)
def _() -> None:
    start = 0

    @replace(LanguageModel, "on_train_start")
    def on_train_start(original: Any, self: Any) -> None:
        nonlocal start
        original(self)
        start = self.trainer.global_step

    @replace(Cosine, "rate")
    def rate(original: Any, self: Any, t: int, peak: float) -> float:
        return original(self, t - start, peak)


@fault("labels-shifted-twice", "c", "labels",
    "The targets are shifted twice, so the model learns the token after the next one.",
    "targets are off by one", "labels are shifted in the data and again in the loss", "it predicts two tokens ahead",
    wrong="The model is too small or the learning rate is too low for these data.",
    place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    targets[:, :-1] = targets[:, 1:].clone()
    targets[:, -1] = -100


@fault("embedding-std-one", "c", "initialisation",
    "The embedding starts with a standard deviation of 1 and is the output matrix too, so the first logits are far too large.",
    "the initial weights of the tied embedding are too large", "bad initialisation: the loss starts far above ln(vocabulary)",
    "the embedding has torch's default initialisation",
    wrong="The learning rate is too high and the run diverges.",
    place=model_built)
def _(gpt: Any) -> None:
    gpt.embedding.weight.normal_(std=1.0, generator=torch.Generator().manual_seed(5))


@fault("dropout-in-evaluation", "c", "evaluation",
    "Dropout stays active in validation: the model is not switched to evaluation mode.",
    "model.eval() is missing", "validation runs in training mode", "the validation loss is measured with dropout",
    wrong="The model overfits, because the validation loss is too high.",
    setup="--model.dropout 0.2")
def _() -> None:
    @replace(LanguageModel, "validation_step")
    def validation_step(original: Any, self: Any, *args: Any) -> None:
        self.model.train()
        original(self, *args)


# fmt: on

NAMES = frozenset(FAULTS) - _BEFORE
