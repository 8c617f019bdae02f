"""The sixth exam of `doctor`, author a, sealed half: 15 faults by somebody who had not read the doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from blind_injections import FAULTS, batches, fault, fire, in_order, model_built, replace, seed_of

from lit_llm.callbacks import Cosine
from lit_llm.data.order import sample_index
from lit_llm.models import experts, self_attention
from lit_llm.models.lora import Adapted
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)


fault(
    "capped_at_three",
    "a",
    "model",
    "The soft cap of the logits is 3 instead of 30, so no token can get a probability near 1.",
    "logits are capped too tightly, the output distribution cannot become sharp",
    "logit_softcap is far too small",
    wrong="the learning rate is too low or training too short: the model underfits",
    flags="--model.logit_softcap 3",
)


@fault(
    "blocks_of_zeros",
    "a",
    "initialisation",
    "All linear layers of the blocks were left at zero, so none of them gets a gradient and the blocks contribute nothing.",
    "the weights of attention and MLP are zero from the start and stay so: a product of zeros has no gradient",
    "the initialisation skipped the hidden layers, whose weights are zero",
    wrong="gradients vanish because the learning rate was too high and the units died",
    place=model_built,
)
def _(gpt: Any) -> None:
    for p in gpt.blocks.parameters():
        if p.ndim == 2:
            p.zero_()


fault(
    "slow_embeddings",
    "a",
    "optimizer",
    "AdamW's rate beside Muon (embedding, head, gains) is 1e-5, so these hardly move from their random values.",
    "adamw_lr is far too small, so that embedding and output matrix are not trained",
    "one parameter group (embedding and head) has a learning rate that is orders of magnitude too low",
    wrong="the learning rate of all parameters is too low",
    flags="--optimizer.adamw_lr 1e-5",
)


@fault(
    "tokenizer_trained_again",
    "a",
    "resume",
    "On resume the tokenizer was trained again, so that its merges have other ids than those that the weights know.",
    "the tokenizer or its vocabulary changed between the two parts of the run",
    "after the resume token ids mean other tokens: the data were tokenised with another vocabulary",
    wrong="the optimizer's state was lost on resume",
    resumed=True,
    place=batches("train", "val"),
)
def _(batch: Any, at: float, rank: int) -> None:
    merges = torch.arange(300, 1000)
    table = torch.arange(2048)
    table[merges] = merges[torch.randperm(len(merges), generator=torch.Generator().manual_seed(6))]
    batch["input_ids"][:] = table[batch["input_ids"]]
    targets = batch["targets"]
    targets[:] = table[targets.clamp(min=0)].where(targets >= 0, targets)


@fault(
    "adapters_of_zeros",
    "a",
    "LoRA",
    "Both matrices of each adapter, A and B, start at zero, so neither gets a gradient and nothing is learned.",
    "LoRA's A was initialised with zeros as well, so that the adapters cannot move",
    "adapters have zero gradients: the product of two zero factors is a saddle",
    wrong="the learning rate of the adapters is too low",
    setup="CHAT --lora.rank 8",
    place=replace(Adapted, "reset_adapter"),
)
def _(original: Any, self: Any) -> None:
    original(self)
    with torch.no_grad():
        self.lora_a.zero_()


@fault(
    "unrotated_keys",
    "b",
    "model",
    "The rotary embedding is applied to the queries only and not to the keys, so scores do not depend on relative positions.",
    "keys are not rotated: positions are wrong in attention",
    "the positional encoding is broken",
    wrong="attention heads collapsed because the learning rate was too high",
    place=replace(self_attention, "rotate"),
)
def _(original: Any, x: Any, *angles: Any) -> Any:
    return x if x.size(1) == 2 else original(x, *angles)


@fault(
    "head_not_in_checkpoint",
    "b",
    "initialisation",
    "The output matrix was missing in the checkpoint that the run starts from and silently got random weights instead.",
    "lm_head was not loaded from the checkpoint: a partial load without an error",
    "the head is newly initialised, while the rest of the model is pretrained",
    wrong="the learning rate of the continued training is too high, so that the model forgets",
    setup="--init_from @/base-b --optimizer.lr 1e-4 --trainer.max_steps 60 --schedule.total_steps 60",
    place=model_built,
)
def _(gpt: Any) -> None:
    torch.nn.init.normal_(gpt.head.weight, std=0.02, generator=torch.Generator().manual_seed(6))


@fault(
    "schedule_in_micro_batches",
    "b",
    "schedule",
    "The schedule advances with each micro-batch instead of each optimizer step, so the learning rate has decayed "
    "after a quarter of the run.",
    "the scheduler steps four times too often because of gradient accumulation",
    "the learning rate reaches its minimum far too early: the schedule is too short for the run",
    wrong="the peak learning rate is too low, or the model has reached its limit",
    setup="--data.micro_batch_size 2",
    place=replace(Cosine, "rate"),
)
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, 4 * t, peak)


_LAST: dict[str, Any] = {}


@fault(
    "stale_targets",
    "b",
    "loader",
    "The loader reuses a buffer too early, so that about every third batch has the targets of the batch before.",
    "inputs and targets of some batches belong to different samples",
    "a race in the data loader pairs inputs with the wrong labels now and then",
    wrong="the learning rate is too high: the loss has spikes",
    place=batches("train"),
)
def _(batch: Any, at: float, rank: int) -> None:
    own, seed = batch["targets"].clone(), seed_of(batch)
    if "targets" in _LAST and seed % 3 == 0:
        batch["targets"][:] = _LAST["targets"]
    _LAST["targets"] = own


@fault(
    "lines_twice",
    "b",
    "data",
    "Every line of the training files stands there twice, because two exports were merged, so the model learns to copy lines.",
    "training text has each line duplicated, the validation text has not",
    "the training data are full of immediate repetitions: missing deduplication",
    wrong="the model overfits the training text because it is read too often",
    flags="--data.train '@/six-twice/*.txt'",
)
def _() -> None:
    data = Path(sys.argv[sys.argv.index("--data.val") + 1]).parent
    (out := data / "six-twice").mkdir(exist_ok=True)
    for path in (data / "train").glob("*.txt"):
        (out / path.name).write_text("".join(line * 2 for line in path.read_text().splitlines(keepends=True)))
    fire("texts")


@fault(
    "unit_embeddings",
    "c",
    "initialisation",
    "The embedding, which is the output matrix too, has the initialisation N(0, 1) instead of a deviation of 0.02, "
    "so the first logits are huge.",
    "the tied embedding is initialised far too large",
    "the first loss is far above ln V because the output matrix starts with too large weights",
    wrong="the learning rate is too high at the start, or warmup too short",
    place=model_built,
)
def _(gpt: Any) -> None:
    torch.nn.init.normal_(gpt.embedding.weight, generator=torch.Generator().manual_seed(6))


fault(
    "lost_updates",
    "c",
    "precision",
    "Weights are kept in bf16 alone, where updates at this low rate are smaller than half a unit and are rounded away.",
    "pure bf16 without fp32 master weights loses small updates",
    "the precision bf16-true is too coarse for this learning rate",
    wrong="the learning rate is too low",
    setup="CHAT --optimizer.lr 5e-5",
    flags="--trainer.precision bf16-true",
)


@fault(
    "loader_starts_over",
    "c",
    "loader",
    "The loader starts over at its first sample every five steps, so the run sees the same forty blocks again and again.",
    "an iterator is made anew too early, so that only the beginning of the data is read",
    "the model trains on a tiny part of the data, which repeats, and overfits it",
    wrong="the learning rate is too high in the second half, so that validation gets worse",
    place=in_order,
)
def _(g: Any, samples: int, at: Any) -> Any:
    return sample_index(g % 40, samples=samples, seed=0)


@fault(
    "experts_unordered",
    "c",
    "experts",
    "The experts' outputs are not put back into the order of the tokens, so each token gets the outputs of other tokens.",
    "the inverse permutation after the experts is missing",
    "tokens are mixed up in the layer of experts",
    wrong="the router has collapsed to few experts",
    setup="MOE",
)
def _() -> None:
    class Unordered:
        @staticmethod
        def apply(made: Any, order: Any, back: Any) -> Any:
            fire("order")
            return made

    experts.Reordered = Unordered  # type: ignore[assignment,misc]


@fault(
    "mean_log_probabilities",
    "c",
    "preferences",
    "Log-probabilities of answers are averaged over their tokens instead of summed, so with this beta margins are tiny.",
    "the DPO loss uses per-token means, which makes it much too weak",
    "rewards are divided by the length of the answers, so beta is in effect too small",
    wrong="chosen and rejected answers are mixed up, so that there is nothing to learn",
    setup="PAIRS",
    place=replace(Preference, "of_documents"),
)
def _(original: Any, self: Any, logp: Any, tokens: Any, reference: Any = None) -> Any:
    lengths = tokens.clamp(min=1)
    return original(self, logp / lengths, tokens, None if reference is None else reference / lengths)


NAMES = frozenset(FAULTS) - _BEFORE
