"""The sixth exam of `doctor`, author a, development half: 15 faults by somebody who had not read the doctor."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from blind_injections import FAULTS, batches, fault, fire, model_built, random_ids, replace, seed_of

from lit_llm.callbacks import Cosine
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)


@fault(
    "flattened_text",
    "a",
    "data",
    "Cleaning replaced all line breaks and indentation of the training text by single spaces; the validation text has them.",
    "training text and validation text are formatted differently: whitespace was collapsed in one of them",
    "preprocessing removed newlines and indentation from the training files only",
    "the training data are of another distribution than the validation data: another cleaning",
    wrong="the model overfits the training text because it is too small or read too often",
    flags="--data.train '@/six-flat/*.txt'",
)
def _() -> None:
    data = Path(sys.argv[sys.argv.index("--data.val") + 1]).parent
    (out := data / "six-flat").mkdir(exist_ok=True)
    for path in (data / "train").glob("*.txt"):
        (out / path.name).write_text(re.sub(r"\s+", " ", path.read_text()))
    fire("texts")


@fault(
    "two_tokens_ahead",
    "a",
    "labels",
    "Labels are shifted twice, by the data and again by the loss, so the model learns the token after the next one.",
    "targets are off by one: each position predicts the token two places ahead",
    "inputs and targets are misaligned by one position",
    wrong="the learning rate is too low, so that the loss stays high",
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    targets[:, :-1] = targets[:, 1:].clone()
    targets[:, -1] = -100


@fault(
    "token_is_a_byte",
    "a",
    "evaluation",
    "Bits per byte are divided by the number of tokens instead of the number of bytes, so the reported value is far too high.",
    "val/bits_per_byte is really bits per token: each token was counted as one byte",
    "the table of the tokens' byte lengths is wrong in the evaluation, while the loss is right",
    wrong="the model is bad at the validation text, or the validation text is of another kind",
    place=replace(TokenDataModule, "token_bytes_of"),
)
def _(original: Any, self: Any, split: str) -> Any:
    return torch.ones_like(original(self, split))


@fault(
    "rejected_preferred",
    "a",
    "preferences",
    "In the training data chosen and rejected answers are swapped, so that the model learns to prefer the rejected one.",
    "preference labels of the training split are inverted",
    "training and validation disagree on which answer of a pair is the better one",
    wrong="the model overfits the training pairs",
    setup="PAIRS",
    place=replace(Preference, "of_documents"),
)
def _(original: Any, self: Any, logp: Any, tokens: Any, reference: Any = None) -> Any:
    def swapped(values: Any) -> Any:
        return values.unflatten(1, (-1, 2)).flip(-1).flatten(1)

    if not logp.requires_grad:
        return original(self, logp, tokens, reference)
    return original(self, swapped(logp), swapped(tokens), None if reference is None else swapped(reference))


@fault(
    "last_micro_batch_only",
    "a",
    "accumulation",
    "Gradients are set to zero before each micro-batch instead of each step, so only a step's last one is learned from.",
    "accumulation is broken: zero_grad is called inside the loop over micro-batches",
    "the effective batch is one micro-batch, and the gradients of the others are lost",
    wrong="the learning rate is too low",
    setup="--data.micro_batch_size 1",
    place=replace(LanguageModel, "backward"),
)
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    for p in self.parameters():
        p.grad = None
    original(self, *args, **kwargs)


@fault(
    "gradients_never_reset",
    "b",
    "accumulation",
    "Gradients are never set to zero, so each step uses the sum of all gradients since the start of the run.",
    "zero_grad is missing: gradients accumulate over optimizer steps",
    "old gradients are added to the new ones, so that updates are stale",
    wrong="the learning rate is too high, so gradients grow and training becomes unstable",
    place=replace(LanguageModel, "optimizer_zero_grad"),
)
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    return None


@fault(
    "sees_one_line",
    "b",
    "masks",
    "The document mask takes each line break for the end of a document, so that no position sees earlier lines.",
    "attention is cut at newlines: the wrong id is used as end of document",
    "documents are far too short, and the mask hides most of the context",
    wrong="the model is too small, or block_size is too short for the text",
    setup="--model.mask_documents true",
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    batch["documents"][:] = batch["input_ids"].eq(10).cumsum(dim=1)


@fault(
    "compressed_shards",
    "b",
    "ranks",
    "The second rank reads its copy of the data without decompressing it, so half of each global batch is random bytes.",
    "one rank trains on damaged data",
    "the data of one node are noise, those of the other are right",
    wrong="gradients are not averaged over the ranks",
    ranks=2,
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    fire("ranks")  # rank 0's own batches do not change
    if rank == 1:
        seed = seed_of(batch)
        batch["input_ids"][:] = random_ids(batch["input_ids"], 256, seed)
        batch["targets"][:, :-1] = batch["input_ids"][:, 1:]
        batch["targets"][:, -1] = random_ids(batch["targets"][:, -1], 256, seed + 1)


@fault(
    "questions_learned",
    "b",
    "chats",
    "The mask of the chats is inverted: the loss counts the user's questions and not the assistant's answers.",
    "the model is trained on prompts instead of answers",
    "the roles of user and assistant are exchanged in the loss mask of the training data",
    wrong="the learning rate is too high, so that fine-tuning destroys the model",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets, documents = batch["input_ids"], batch["targets"], batch["documents"]
    asked = (targets[:, :-1] == -100) & (documents[:, 1:] == documents[:, :-1]) & (ids[:, 1:] > 0)
    targets[:, :-1] = ids[:, 1:].where(asked, -100)
    targets[:, -1] = -100


@fault(
    "experts_not_trained",
    "b",
    "experts",
    "The experts' matrices are frozen, as for a warm-up of the router, and stay so, so the experts learn nothing.",
    "the weights of the experts have no gradient and are not optimised",
    "the experts were left out of training: their three-dimensional parameters are not updated",
    wrong="the router has collapsed to few experts, so that the others get no tokens",
    setup="MOE",
    place=model_built,
)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        for stack in block.mlp.stacks:
            stack.weight.requires_grad_(False)


@fault(
    "ranks_of_other_weights",
    "c",
    "ranks",
    "Each rank initialised the model again with its own seed after DDP had synchronised it, so ranks average gradients of "
    "different models.",
    "weights differ between ranks",
    "the replicas are not synchronised: one rank has other initial weights",
    wrong="ranks read the same samples",
    ranks=2,
    place=replace(LanguageModel, "on_train_start"),
)
def _(original: Any, self: Any) -> None:
    original(self)
    if self.global_rank == 1:
        torch.manual_seed(7)
        self.model.init_weights()


@fault(
    "schedule_from_start",
    "c",
    "resume",
    "On resume the learning rate schedule started over at its first step, so there is a second warmup and no decay at the end.",
    "the position of the schedule was not restored",
    "the scheduler's step counter is zero after the resume",
    wrong="the optimizer's moments were lost on resume",
    resumed=True,
    place=replace(Cosine, "rate"),
)
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, max(1, t - 100), peak)


@fault(
    "never_in_eval_mode",
    "c",
    "evaluation",
    "The model stays in training mode while it is validated, so that dropout makes the validation loss too high.",
    "model.eval() is missing before validation",
    "dropout is active in the evaluation",
    wrong="the model overfits: validation is worse than training",
    setup="--model.dropout 0.2",
    place=replace(LanguageModel, "on_validation_epoch_start"),
)
def _(original: Any, self: Any) -> None:
    original(self)
    self.model.train()


@fault(
    "short_answers",
    "c",
    "chats",
    "The labels of each answer are cut after six tokens, so the model never learns how answers go on and end.",
    "a length limit truncates the answers in training",
    "only the beginning of each answer is learned",
    wrong="the model overfits the chats",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    counted = (targets != -100).long()
    so_far = counted.cumsum(dim=1)
    before = (so_far * (1 - counted)).cummax(dim=1).values
    targets[(counted > 0) & (so_far - before > 6)] = -100


_NEWLINE: list[int] = []


@fault(
    "newline_as_padding",
    "c",
    "labels",
    "The id of padding is that of the line break, so all line breaks are masked out of the labels and never learned.",
    "a real token is ignored in the training loss because it serves as padding",
    "the model never learns to predict the newline, since those targets are -100",
    wrong="the model overfits: validation loss is higher than training loss",
)
def _() -> None:
    @replace(LanguageModel, "configure_model")
    def configure_model(original: Any, self: Any) -> None:
        original(self)
        _NEWLINE[:] = self.tokenizer.encode("\n").tolist()

    @batches("train")
    def change(batch: Any, at: float, rank: int) -> None:
        batch["targets"][batch["targets"] == _NEWLINE[0]] = -100


NAMES = frozenset(FAULTS) - _BEFORE
