"""The fifth exam of `doctor`, author a, development half: 15 faults by somebody who had not read the doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from blind_injections import FAULTS, batches, cosine, fault, fire, in_order, model_built, replace
from torch import Tensor

from lit_llm.callbacks import Cosine
from lit_llm.data.order import sample_index
from lit_llm.models import experts, self_attention
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)


@fault(
    "answers_of_neighbours",
    "a",
    "chats",
    "Questions and answers of the chats do not belong together: one column was moved by a row when the file was written.",
    "answers are paired with the wrong questions",
    "prompts and responses are misaligned in the data",
    "the answers cannot be told from the questions: the chats are mismatched",
    wrong="The learning rate is too low.",
    setup="CHAT",
    flags="--data.paths @/chat-5a.jsonl",
)
def _() -> None:
    target = Path(sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index("--data.paths") + 1])
    rows = [json.loads(line) for line in target.with_name("chat.jsonl").read_text().splitlines()]
    answers = [row["messages"][1] for row in rows]
    moved = [{"messages": [row["messages"][0], answers[i - 1]]} for i, row in enumerate(rows)]
    target.write_text("".join(json.dumps(row) + "\n" for row in moved))
    fire("chats")


@fault(
    "shifted_twice_5a",
    "a",
    "labels",
    "The targets are shifted twice: each position is trained on the token after the next one.",
    "labels are off by one",
    "targets are one position too far ahead",
    "inputs and targets are misaligned by a position",
    wrong="The model is too small.",
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    targets = batch["targets"]
    targets[:, :-1] = targets[:, 1:].clone()
    targets[:, -1] = -100


@fault(
    "reference_is_policy",
    "a",
    "preferences",
    "The reference model of DPO is the model in training itself, so the log-ratios are always zero.",
    "the reference follows the policy: it is the same object",
    "the reference is not frozen",
    "rewards and margin are zero because policy and reference are identical",
    wrong="The learning rate is too low, or beta too small.",
    setup="PAIRS --optimizer.lr 1e-3",
)
def _() -> None:
    @replace(Preference, "of_documents")
    def of_documents(original: Any, self: Any, logp: Tensor, tokens: Tensor, reference: Any = None) -> Any:
        return original(self, logp, tokens, logp.detach())


@fault(
    "debug_subset_left",
    "a",
    "data",
    "Training reads the same 32 blocks again and again: a limit from debugging was left in, and they are learned by heart.",
    "only a tiny part of the training data is read",
    "overfitting: a small subset of the data is repeated many times",
    "memorises the training samples, because there are too few distinct ones",
    wrong="The model is too large, or needs dropout.",
    place=in_order,
)
def _(g: Any, samples: int, at: Any) -> Any:
    return sample_index(g % 32, samples=samples, seed=0)


@fault(
    "vocabulary_retrained",
    "a",
    "resume",
    "Since the resume, ids mean other tokens: the tokenizer was trained again, and its merges have other numbers.",
    "the tokenizer differs from that of the checkpoint",
    "the token ids were permuted between the two parts of the run",
    "the data after the resume were tokenised with another vocabulary",
    wrong="The state of the optimizer was lost on resume.",
    resumed=True,
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    first, end = 300, 1000
    numbers = torch.arange(1024)
    numbers[first:end] = first + torch.randperm(end - first, generator=torch.Generator().manual_seed(5))
    for ids in batch.values():
        ids.copy_(torch.where(ids >= 0, numbers[ids.clamp(0, 1023)], ids))


@fault(
    "lowercased_training_5a",
    "b",
    "data",
    "The training text was lowercased by its cleaning, but the validation text was not.",
    "preprocessing of training and validation text differs",
    "training data have no capital letters, which validation has",
    "the distributions of training and validation tokens differ",
    wrong="Overfitting: there is too little data.",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    for ids in (batch["input_ids"], batch["targets"]):
        ids += 32 * ((ids >= ord("A")) & (ids <= ord("Z")))


@fault(
    "cosine_rises_again_5a",
    "b",
    "schedule",
    "The cosine has half the length of the run, so the learning rate rises back to its peak until the end.",
    "T_max of the cosine is too small: the rate goes up again in the second half",
    "the learning rate is at its peak at the end of training",
    "the schedule does not decay to the end: its period is shorter than the run",
    wrong="The data of the second half are worse.",
)
def _() -> None:
    @replace(Cosine, "rate")
    def rate(original: Any, self: Any, t: int, peak: float) -> float:
        if t <= self.warmup_steps:
            return original(self, t, peak)
        half = (self._total - self.warmup_steps) / 2
        return peak * (self.final_ratio + (1 - self.final_ratio) * cosine((t - self.warmup_steps) / half))


@fault(
    "rotary_other_layout",
    "b",
    "model",
    "The rotary embedding pairs neighbouring dimensions, but the loaded weights were trained with pairs of halves.",
    "the rotary convention differs from the checkpoint's (interleaved instead of half-split)",
    "the positions are computed otherwise than in the pretrained model",
    "the loaded weights do not fit the code: the model at the start is far worse than its checkpoint",
    wrong="The learning rate is too high and destroys the pretrained model.",
    setup="--init_from @/base-KIND --optimizer.lr 5e-5",
)
def _() -> None:
    @replace(self_attention, "rotate")
    def rotate(original: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


@fault(
    "dpo_of_means",
    "b",
    "preferences",
    "The log-probabilities of the answers are means over tokens instead of sums, so the rewards of DPO are far too small.",
    "DPO uses length-normalised log-probabilities",
    "logp is averaged over tokens instead of summed",
    "the log-ratios are divided by the length, so beta is in effect much smaller",
    wrong="The preference pairs carry no signal.",
    setup="PAIRS --optimizer.lr 1e-3",
)
def _() -> None:
    @replace(Preference, "of_documents")
    def of_documents(original: Any, self: Any, logp: Tensor, tokens: Tensor, reference: Any = None) -> Any:
        length = tokens.clamp(min=1)
        return original(self, logp / length, tokens, None if reference is None else reference / length)


@fault(
    "every_worker_everything",
    "b",
    "loader",
    "Each of four workers of the loader reads the whole data, so every sample comes four times in a row.",
    "samples are duplicated: the dataset is not split over workers",
    "a batch has the same sequences several times, so the effective batch is a quarter",
    "the loader repeats each sample",
    wrong="The text itself has many duplicates.",
    place=in_order,
)
def _(g: Any, samples: int, at: Any) -> Any:
    return sample_index(g // 4, samples=samples, seed=0)


@fault(
    "experts_put_back_wrong",
    "c",
    "experts",
    "The outputs of the experts are not put back in the order of the tokens, so a token gets those of other tokens.",
    "the permutation of tokens to experts is undone wrongly",
    "expert outputs are scattered to the wrong positions",
    "the experts contribute noise: dispatch and combine do not match",
    wrong="The router has collapsed onto few experts.",
    setup="MOE",
)
def _() -> None:
    @replace(experts.Reordered, "apply")
    def apply(original: Any, made: Tensor, back: Tensor, order: Tensor) -> Tensor:
        return original(made, order, back)


@fault(
    "inputs_shuffled_alone",
    "c",
    "labels",
    "The rows of the inputs were shuffled without the targets, so the targets belong to other sequences.",
    "inputs and labels come from different samples",
    "the targets do not belong to the inputs",
    "only token frequencies can be learned, because labels are unrelated to the inputs",
    wrong="The learning rate is too low.",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    batch["input_ids"] = batch["input_ids"].roll(1, dims=0)


@fault(
    "both_factors_zero",
    "c",
    "LoRA",
    "Both factors of every LoRA adapter start at zero, so neither ever has a gradient and nothing is learned.",
    "lora_a is initialised with zeros, as is lora_b",
    "the adapters are stuck at zero: their gradients are exactly zero",
    "wrong initialisation of the adapters",
    wrong="The learning rate is too low.",
    setup="CHAT --lora.rank 8 --lora.alpha 16",
    place=model_built,
)
def _(gpt: Any) -> None:
    for name, parameter in gpt.named_parameters():
        if name.endswith("lora_a"):
            parameter.zero_()


@fault(
    "schedule_starts_over",
    "c",
    "resume",
    "On resume the schedule began again at step 0: a second warmup, and a rate that stays high until the end of the run.",
    "the scheduler's state was not restored",
    "the learning rate restarted after the resume and does not decay to its end",
    "the schedule forgot the steps made before the resume",
    wrong="The moments of the optimizer were lost.",
    resumed=True,
)
def _() -> None:
    @replace(Cosine, "on_train_start")
    def on_train_start(original: Any, self: Any, trainer: Any, module: Any) -> None:
        original(self, trainer, module)
        self.begun = trainer.global_step

    @replace(Cosine, "rate")
    def rate(original: Any, self: Any, t: int, peak: float) -> float:
        return original(self, t - getattr(self, "begun", 0), peak)


fault(
    "narrow_window",
    "c",
    "masks",
    "The sliding window of attention is four tokens, so the model hardly sees any context.",
    "model.window is far too small",
    "attention is limited to the last few tokens",
    "the model cannot use long context, because of the attention mask",
    wrong="The learning rate is too low, or the model too small.",
    flags="--model.window 4",
)

NAMES = frozenset(FAULTS) - _BEFORE
