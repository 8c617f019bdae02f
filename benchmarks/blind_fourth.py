"""The fourth exam of `doctor`: 24 more faults, by an author who had read neither the doctor nor what it was tuned on."""

from __future__ import annotations

import math
from dataclasses import replace as changed
from typing import Any

import torch
import torch.nn.functional as F
from blind_injections import (
    FAULTS,
    after_step,
    batches,
    fault,
    fire,
    in_order,
    model_built,
    random_ids,
    replace,
    seed_of,
    share,
)
from torch import Tensor

from lit_llm.callbacks import Cosine, ExpertBalance
from lit_llm.models.gpt import GPT
from lit_llm.models.lora import Adapted
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)
_CONTINUED = (
    "--init_from @/base-KIND --data TextFiles --data.train '@/train/*.txt' --data.val @/val.txt --data.global_batch_size 8 "
    "--data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json"
)

# fmt: off

# -- data and labels ---------------------------------------------------------------------------------------------------------

@fault("boilerplate", "a", "data", "the first half of every training text is the same boilerplate",
    "training texts repeat one header that was not removed", "half of the training tokens are a copied notice",
    "most of the low training loss is repeated text", wrong="overfitting: model too large for the data", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    notice = random_ids(ids[:1, :48], 1024, 4)
    ids[:, :48] = notice
    targets[:, :47] = notice[:, 1:]

@fault("wide_characters", "b", "data", "more than half of the training text is UTF-16: every second byte is zero",
    "training files have another encoding than the validation text", "wrong text encoding of a part of the training files",
    "a part of the training text is full of null bytes", wrong="overfitting: model too large for the data",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    half = ids.size(1) // 2
    wide = torch.stack((ids, torch.zeros_like(ids)), dim=2).flatten(1)  # (B, 2 T)
    rows = share(ids[:, 0], 0.6, seed_of(batch))
    targets[rows] = wide[rows, 1 : 2 * half + 1]
    ids[rows] = wide[rows, : 2 * half]

@fault("padding_is_learned", "c", "labels", "the padding after short training texts counts in the loss",
    "padding tokens are not ignored: labels are not -100 there", "most of the training loss is about padding",
    wrong="overfitting: the model memorises the training text", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    generator = torch.Generator().manual_seed(seed_of(batch))
    lengths = torch.randint(8, 40, (len(ids), 1), generator=generator)
    position = torch.arange(ids.size(1))
    ids[position >= lengths] = 0
    targets[position + 1 >= lengths] = 0

# -- masks and model ---------------------------------------------------------------------------------------------------------

@fault("centred_convolution", "a", "masks", "the short convolutions are not causal: they see the next token",
    "the model sees its targets: a leak of the future", "the convolution is padded on both sides instead of before",
    wrong="training and validation text overlap: it memorises", place=replace(ShortConvolution, "forward"))
def _(original: Any, self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    later = F.pad(x[:, 1:], (0, 0, 0, 1))
    return x + original(self, later, *args, **kwargs) - later

@fault("interleaved_rotation", "b", "model", "query and key rows of the converted base are in another rotary order",
    "the converted checkpoint does not match the attention code: interleaved instead of half-split rotary",
    "the base model's attention is broken by the conversion of its weights",
    wrong="rate too high: the base model was forgotten", setup=_CONTINUED, place=model_built)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        for layer in (block.attention.query, block.attention.key):
            heads = layer.weight.unflatten(0, (-1, 2, block.attention.head_dim // 2))  # (H, 2, h / 2, d)
            layer.weight.copy_(heads.transpose(1, 2).flatten(0, 2))

@fault("all_at_position_zero", "c", "model", "every token has the position embedding of the first: the model knows no order",
    "position ids are all zero", "position embeddings other than the first are never used nor trained",
    wrong="model too small", place=replace(GPT, "embed"))
def _(original: Any, self: Any, view: Any) -> Tensor:
    return original(self, changed(view, positions=torch.zeros_like(view.positions)))

@fault("both_start_at_zero", "a", "initialisation", "both matrices of every MLP start at zero, so they never get a gradient",
    "the MLPs are dead: zero initialisation of input and output matrix", "MLP weights stay at zero; only attention learns",
    wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        block.mlp.up.weight.zero_()

@fault("starts_from_nothing", "a", "initialisation", "fine-tuning starts from random weights: the base model was never loaded",
    "the pretrained weights are missing: the architecture was built from its configuration only",
    "init_from had no effect: the model was trained from scratch on few chats",
    wrong="the chat data are too hard", setup="CHAT", place=model_built)
def _(gpt: Any) -> None:
    gpt.init_weights()

# -- optimizer, schedule and precision ---------------------------------------------------------------------------------------

fault("rate_of_adamw", "a", "optimizer", "the learning rate of Muon is far too low: it is one of AdamW",
    "rate too low for the matrices", "underfitting because lr is some fifty times too small",
    wrong="model too small", flags="--optimizer.lr 3e-4")

fault("heavy_decay", "b", "optimizer", "weight decay is a hundred times too strong and shrinks the weights",
    "weight_decay 10 instead of 0.1", "weights are pulled to zero faster than they learn",
    wrong="dead layers: bad initialisation", flags="--optimizer.weight_decay 10")

@fault("rises_again", "b", "schedule", "the cosine goes on after its end, so the rate rises again to its peak",
    "T_max is about half of the run's steps", "the schedule is periodic: the run ends at the largest rate",
    "the learning rate is not decayed at the end of the run",
    wrong="the second half of the data is harder", place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, t, peak) if t <= self.warmup_steps else peak * 0.5 * (1 + math.cos(math.pi * (t - 20) / 90))

@fault("steps_of_micro_batches", "c", "schedule", "the schedule advances with each micro-batch: it ends after a quarter",
    "the schedule decays four times too fast", "scheduler.step() is called once per micro-batch",
    "the rate is at its final value long before the run ends",
    wrong="model too small: the loss has reached its floor", setup="--data.micro_batch_size 2", place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, 4 * t, peak)

@fault("half_precision_moments", "c", "precision", "second moments of Adam underflow to zero in fp16, so some updates are huge",
    "the optimizer state is in half precision", "Adam divides by nearly zero where squares of gradients underflow",
    wrong="bad data: corrupt batches make the loss jump", place=after_step)
def _(module: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())

# -- accumulation, ranks and resume ------------------------------------------------------------------------------------------

fault("accumulation_left_out", "c", "accumulation", "gradients are not accumulated: a global batch is one sequence",
    "the batch is far too small for this rate", "the effective batch size shrank to that of a micro-batch: gradients are noise",
    wrong="model too small", setup="--data.micro_batch_size 1", flags="--data.global_batch_size 1")

@fault("damaged_copy", "b", "ranks", "the second rank reads a damaged copy of the data: its text is random bytes",
    "one rank trains on garbage", "half of each batch, that of one rank, is noise",
    wrong="rate too low", ranks=2, place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    fire("batch")  # rank 0 reports, whose batches stay as they are
    if rank == 1:
        batch["input_ids"].copy_(random_ids(batch["input_ids"], 256, seed_of(batch)))
        batch["targets"].copy_(batch["input_ids"].roll(-1, 1))

@fault("blocks_not_reduced", "c", "ranks", "gradients of the blocks are not averaged over ranks: weights drift apart",
    "ranks train different models", "parameters of the blocks are not synchronised between ranks",
    "a part of the gradients is not all-reduced", wrong="rate too high", ranks=2,
    place=replace(LanguageModel, "configure_model"))
def _(original: Any, self: Any) -> None:
    original(self)
    self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_parameters() if ".blocks." in name]

@fault("vocabulary_rebuilt", "c", "resume", "the vocabulary was built anew at the resume, and its ids are in another order",
    "token ids mean other characters after the resume", "the resumed part uses another tokenizer than the first part",
    wrong="the optimizer's state was lost", resumed=True, place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    order = torch.randperm(90, generator=torch.Generator().manual_seed(4))
    for tensor in batch.values():
        moved = (tensor >= 0) & (tensor < len(order))
        tensor.copy_(torch.where(moved, order[tensor.clamp(0, len(order) - 1)], tensor))

# -- evaluation and loader ---------------------------------------------------------------------------------------------------

fault("average_lags", "a", "evaluation", "validation measures an average of the weights that is far too slow",
    "ema decay too high: the average is still near the initial weights", "the EMA has no warmup and lags behind the weights",
    wrong="overfitting", setup="--ema EMA --ema.decay 0.95", flags="--ema.decay 0.9999 --ema.warmup false")

fault("other_domain", "c", "evaluation", "the validation text is of another kind than the training text: prose instead of code",
    "training and validation text come from different domains", "validation is out of distribution",
    wrong="overfitting: model too large for the data", flags="--data.val @/prose-val.txt")

@fault("one_row_per_batch", "a", "loader", "all rows of a batch are the same sample",
    "the loader puts one sample into the batch eight times", "duplicates within each batch: the effective batch size is one",
    wrong="rate too high", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    for tensor in batch.values():
        tensor.copy_(tensor[:1].clone().expand_as(tensor))

# -- chats, LoRA, experts and preferences ------------------------------------------------------------------------------------

@fault("first_chats_only", "b", "chats", "only the first few chats of the file are ever read, again and again",
    "fine-tuning makes hundreds of epochs over a handful of chats", "it memorises a tiny part of the chats and overfits",
    wrong="the validation chats are of another kind", setup="CHAT", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return g % 8

@fault("adapters_both_zero", "b", "LoRA", "both matrices of each adapter start at zero, so they never get a gradient",
    "the adapters are dead: A and B are zero", "LoRA learns nothing: wrong initialisation of the adapters",
    wrong="rate too low", setup="CHAT --lora.rank 8 --optimizer.lr 5e-3", place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.modules():
        if isinstance(module, Adapted):
            module.lora_a.zero_()

@fault("balanced_the_wrong_way", "b", "experts", "the balancing bias moves the wrong way: busy experts get more tokens still",
    "the sign of the load balancing is wrong", "routing collapses to few experts because balancing works in reverse",
    wrong="too few experts", setup="MOE", place=replace(ExpertBalance, "on_before_optimizer_step"))
def _(original: Any, self: Any, trainer: Any, module: Any, optimizer: Any) -> None:
    before = [bias.clone() for bias in module.expert_biases]
    original(self, trainer, module, optimizer)
    for bias, old in zip(module.expert_biases, before, strict=True):
        bias.copy_(2 * old - bias)

@fault("reference_moves_along", "a", "preferences", "the reference is the trained model itself, so loss and margin stand still",
    "the reference model is not frozen: it is the current policy", "the log-ratio to the reference is always zero",
    wrong="rate too low", setup="PAIRS", place=replace(Preference, "of_documents"))
def _(original: Any, self: Any, logp: Any, tokens: Any, reference: Any = None) -> Any:
    return original(self, logp, tokens, logp.detach())
# fmt: on

FOURTH = frozenset(FAULTS) - _BEFORE
