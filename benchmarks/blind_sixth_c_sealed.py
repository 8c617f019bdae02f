"""The sixth exam of `doctor`, author c, sealed half: 7 faults by somebody who had not read the doctor."""

from __future__ import annotations

from typing import Any

import torch
from blind_injections import FAULTS, batches, fault, in_order, replace
from torch import Tensor

from lit_llm.callbacks import ExpertBalance
from lit_llm.data.order import sample_index
from lit_llm.training.language_model import LanguageModel

_BEFORE = frozenset(FAULTS)


@fault(
    "each_worker_reads_all",
    "a",
    "loader",
    "Each of the four workers of the loader reads the whole stream instead of its part, so each batch comes four times.",
    "An iterable dataset is not split over the loader's workers: training sees each batch four times.",
    "The same batches are repeated in consecutive steps, by duplicates of the loader.",
    wrong="The data set is too small, or contains duplicated documents.",
    place=in_order,
)
def _(g: Any, samples: int, at: Any) -> Any:
    return sample_index(g // 32 * 8 + g % 8, samples=samples, seed=0)


@fault(
    "mask_before_padding",
    "a",
    "masks",
    "The loss mask of the answers was computed before four tokens were put in front, so it lies four tokens too early: it has "
    "the end of the question, and not the end of the answer.",
    "The mask of the answers is shifted against the tokens.",
    "The last tokens of each answer are never targets in training, but the end of the question is.",
    wrong="The learning rate is too low, or the run too short, for the answers to be learned.",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    following = torch.cat((batch["input_ids"][:, 1:], targets[:, -1:]), dim=1)
    earlier = torch.nn.functional.pad(targets != -100, (0, 4))[:, 4:]
    batch["targets"] = torch.where(earlier, following, -100)


fault(
    "tuned_in_bf16",
    "b",
    "precision",
    "The weights themselves are in bf16, without an fp32 copy, so most of the small updates of tuning are lost to rounding.",
    "Pure bf16 training (bf16-true): updates smaller than half a unit in the last place do not change the weights.",
    "There are no fp32 master weights: use bf16-mixed.",
    wrong="The learning rate is too low for this data.",
    setup="CHAT --optimizer.lr 1e-4",
    flags="--trainer.precision bf16-true",
)


fault(
    "adapters_at_rate_of_full_tuning",
    "b",
    "LoRA",
    "The learning rate of 2e-5 is one for tuning all weights; adapters need one that is ten to a hundred times as large.",
    "The learning rate is far too low for LoRA, so the adapters hardly move from zero.",
    "The tuned model is nearly the base, because the updates of the adapters are too small.",
    wrong="The rank of the adapters is too small.",
    setup="CHAT --lora.rank 8 --lora.targets null",
    flags="--optimizer.lr 2e-5",
)


@fault(
    "gradients_reset_inside_step",
    "b",
    "accumulation",
    "Gradients are set to zero before each micro-batch, so a step has the gradient of the last micro-batch alone.",
    "zero_grad is called inside the accumulation loop: the effective batch is one sequence instead of eight.",
    "Accumulation does not accumulate: the gradient is as noisy as that of one micro-batch.",
    wrong="The data are noisy, so choose a larger global batch.",
    setup="--data.micro_batch_size 1",
    place=replace(LanguageModel, "backward"),
)
def _(original: Any, self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    for p in self.parameters():
        p.grad = None
    original(self, loss, *args, **kwargs)


@fault(
    "balance_of_wrong_sign",
    "c",
    "experts",
    "The balancing bias has the wrong sign: it rises for busy experts and falls for idle ones, so all tokens go to a few.",
    "Experts collapse, because the load balancing pushes tokens to the experts that are already overloaded.",
    "The router sends nearly everything to two experts; the update of the bias works against balance.",
    wrong="There are too many experts for this amount of data.",
    setup="MOE",
    place=replace(ExpertBalance, "on_before_optimizer_step"),
)
def _(original: Any, self: Any, *args: Any) -> None:
    self.rate = -abs(self.rate)
    original(self, *args)


@fault(
    "end_of_turn_not_learned",
    "c",
    "chats",
    "The token that ends each answer is not among the targets of training, so the model never learns to stop.",
    "The end-of-turn token is masked out of the loss (as where padding has the same id).",
    "Training ignores the last target of every answer, which validation counts.",
    wrong="The model overfits the few chats.",
    setup="CHAT",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    counted = batch["targets"] != -100
    following = torch.nn.functional.pad(counted[:, 1:], (0, 1))
    batch["targets"].masked_fill_(counted & ~following, -100)


NAMES = frozenset(FAULTS) - _BEFORE
