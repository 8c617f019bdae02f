"""The sixth exam of `doctor`, author b, development half: 7 faults by somebody who had not read the doctor."""

from __future__ import annotations

from typing import Any

import torch
from blind_injections import FAULTS, batches, fault, replace

from lit_llm.training.language_model import LanguageModel

_BEFORE = frozenset(FAULTS)


@fault(
    "other_vocabulary_on_rank",
    "a",
    "ranks",
    "one rank reads tokens of another vocabulary (an old tokenizer on that machine), so half of each batch is of other ids",
    "the data of rank 1 differ from those of rank 0",
    "one rank's tokens are corrupt",
    wrong="the learning rate is too high",
    ranks=2,
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    if rank == 1:
        for ids in (batch["input_ids"], batch["targets"]):
            ids.copy_(torch.where(ids < 0, ids, (ids + 389) % 1000))


fault(
    "rate_of_full_tuning",
    "a",
    "LoRA",
    "the learning rate of the adapters is that of full fine-tuning, about a hundred times too low for LoRA",
    "the learning rate is too low",
    "the adapters hardly move",
    wrong="the rank of the adapters is too small",
    setup="CHAT --lora.rank 8 --lora.alpha 16",
    flags="--optimizer.lr 1e-5",
)


@fault(
    "newline_is_padding",
    "b",
    "masks",
    "the id of the newline is taken for padding, so no newline counts in the training loss and the model never learns them",
    "a frequent token is masked from the loss as padding (pad id = newline)",
    "some targets are left out of the training loss but not of the validation loss",
    wrong="overfitting",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"][batch["targets"] == 10] = -100


@fault(
    "inverted_answer_mask",
    "b",
    "chats",
    "the loss mask is inverted: the tokens of the user count in training and the answers do not",
    "training is on the prompts instead of the answers",
    "the assistant mask is the wrong way round",
    wrong="overfitting",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    following = torch.cat((ids[:, 1:], ids.new_full((len(ids), 1), -100)), dim=1)
    targets.copy_(torch.where(targets == -100, following, -100))


fault(
    "other_rotary_base",
    "b",
    "model",
    "training goes on from a checkpoint with another base of the rotary angles than that which it was trained with",
    "rope_theta differs from that of the weights",
    "a setting of the model does not match the checkpoint, so the weights start with a much worse loss",
    wrong="the new data are of another domain",
    setup="--init_from @/base-KIND --data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json "
    "--optimizer.lr 3e-4",
    flags="--model.rope_theta 10",
)


@fault(
    "double_shift_of_labels",
    "c",
    "labels",
    "the labels are shifted twice, by the data and by the loss, so the model learns the token after the next one",
    "off by one: targets are two tokens ahead",
    "inputs and targets are misaligned by one position",
    wrong="the model is too small",
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    targets.copy_(torch.cat((targets[:, 1:], targets.new_full((len(targets), 1), -100)), dim=1))


@fault(
    "blocks_not_restored",
    "c",
    "resume",
    "on resuming, the weights of the blocks were not restored from the checkpoint (names did not match, strict=False), so they "
    "started again from random ones",
    "a part of the weights was initialised anew at the resume",
    "the checkpoint was loaded only in part",
    wrong="the optimizer state was lost at the resume",
    resumed=True,
    place=replace(LanguageModel, "on_train_start"),
)
def _(original: Any, self: Any) -> None:
    original(self)
    with torch.no_grad():
        for p in self.model.blocks.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)


NAMES = frozenset(FAULTS) - _BEFORE
