"""The sixth exam of `doctor`, author c, development half: 8 faults by somebody who had not read the doctor."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from blind_injections import FAULTS, batches, fault, fire, model_built, replace

from lit_llm.callbacks import Cosine
from lit_llm.optim import MuonAdamW

_BEFORE = frozenset(FAULTS)


@fault(
    "layout_lost",
    "a",
    "data",
    "The cleaning of the training text joined all words by single spaces, so it has no line breaks and indentation, which the "
    "held-out text has.",
    "Training and validation text were prepared differently: the whitespace of the training text is gone.",
    "The held-out text has line breaks and indentation that the tokenizer and the model have never seen in training.",
    wrong="The model overfits, so give it more text or regularise it.",
    flags="--data.train '@/flat/*.txt'",
)
def _() -> None:
    pattern = Path(sys.argv[max(i for i, word in enumerate(sys.argv) if word == "--data.train") + 1])
    pattern.parent.mkdir(exist_ok=True)
    for path in sorted((pattern.parent.parent / "train").glob("*.txt")):
        (pattern.parent / path.name).write_text(" ".join(path.read_text().split()))
    fire("files")


@fault(
    "muon_takes_all_matrices",
    "a",
    "optimizer",
    "Muon updates every parameter of two dimensions, so the embedding and the output matrix too, which belong to AdamW.",
    "The parameter groups are wrong: embeddings and head are orthogonalised by Muon instead of trained with AdamW.",
    "Only hidden matrices should be given to Muon, but the embedding and the head were, too.",
    wrong="The learning rate of Muon is too high for the hidden matrices.",
    place=replace(MuonAdamW, "add_param_group"),
)
def _(original: Any, self: Any, group: dict[str, Any]) -> None:
    original(self, group | {"name": "matrix"} if group.get("name") == "embedding" else group)


@fault(
    "schedule_of_micro_batches",
    "a",
    "schedule",
    "The schedule advances with each micro-batch instead of each optimizer step, so with four of them the rate is at its end "
    "after a quarter of the run.",
    "The scheduler is stepped four times per optimizer step: the learning rate decays to zero far too early.",
    "The total steps of the schedule do not take the accumulation into account: it ends at step 50 of 200.",
    wrong="The model is too small, or the data are used up: the loss has reached its floor.",
    setup="--data.micro_batch_size 2",
    place=replace(Cosine, "rate"),
)
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, 4 * t, peak)  # type: ignore[no-any-return]


@fault(
    "heads_not_permuted",
    "b",
    "model",
    "The loaded query and key weights have the rotary pairs in the interleaved order, but the model rotates halves: the "
    "conversion of the checkpoint left out the permutation.",
    "RoPE layout mismatch (interleaved against half-split) between checkpoint and model.",
    "Rows of the query and key matrices are in the wrong order for this rotary embedding.",
    "The weights that training starts from were converted wrongly: attention of the loaded model is broken.",
    wrong="The learning rate is too high for continued training, so the model forgets.",
    setup="--init_from @/base-b --optimizer.lr 1e-4",
    place=model_built,
)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        attention = block.attention
        for weight in (attention.query.weight, attention.key.weight):
            pairs = weight.unflatten(0, (-1, attention.head_dim // 2, 2))
            weight.copy_(pairs.transpose(1, 2).flatten(0, 2).clone())


@fault(
    "pairs_cut_at_seven_tokens",
    "b",
    "preferences",
    "Answers of the pairs are cut after their first seven tokens, which the chosen and the rejected one have in common.",
    "The maximum length is so short that what distinguishes the two answers is cut off.",
    "Chosen and rejected answers are the same after truncation, so there is nothing to prefer.",
    wrong="The learning rate or β is too small for the preferences to be learned.",
    setup="PAIRS",
    flags="--data.path @/cut-pairs-b",
)
def _() -> None:
    folder = Path(sys.argv[max(i for i, word in enumerate(sys.argv) if word == "--data.path") + 1])
    if not folder.exists():  # a folder of its own, because the reference is stored there
        shutil.copytree(folder.parent / "pairs-b", folder, ignore=shutil.ignore_patterns("reference-*"))

    @batches("train", "val")
    def change(batch: Any, at: float, rank: int) -> None:
        targets, documents = batch["targets"], batch["documents"]
        for document in documents.unique():
            counted = (targets != -100) & (documents == document)
            targets[counted & (counted.cumsum(dim=1) > 7)] = -100


@fault(
    "embedding_left_at_one",
    "c",
    "initialisation",
    "The tied embedding has the standard deviation of 1 that torch gives it, so the first logits are far too large.",
    "The initial scale of the token embedding, which is the output matrix too, is much too large (1 instead of 0.02).",
    "nn.Embedding was not initialised by the model's rule; the loss at step 1 is far above that of a uniform guess.",
    wrong="The learning rate is too high and the run diverges at its beginning.",
    place=model_built,
)
def _(gpt: Any) -> None:
    gpt.embedding.weight.normal_(generator=torch.Generator().manual_seed(5))


@fault(
    "schedule_begins_anew",
    "c",
    "resume",
    "The resumed part starts the schedule at its beginning, because the scheduler's state was not restored: there is a second "
    "warmup, and the rate never comes down to its end.",
    "The learning rate starts over after resuming.",
    "The step count of the schedule was reset to zero at the resume.",
    wrong="The optimizer's moments were lost at the resume.",
    resumed=True,
    place=replace(Cosine, "rate"),
)
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, max(1, t - 100), peak)  # type: ignore[no-any-return]


fault(
    "average_longer_than_run",
    "c",
    "evaluation",
    "Validation measures an average of the weights whose decay of 0.999 without warmup is too long for 200 steps, so it is "
    "mostly the random initial weights.",
    "The EMA that is validated still holds the initial weights: its decay is too near 1 for so short a run.",
    "Validation measures other weights than training: the averaged ones lag far behind.",
    wrong="The model overfits, since validation stays high while the training loss falls.",
    flags="--ema EMA --ema.decay 0.999 --ema.warmup false",
)


NAMES = frozenset(FAULTS) - _BEFORE
