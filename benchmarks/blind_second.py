"""The second exam of `doctor`: 30 more faults, by an author who had read neither the doctor nor what it was tuned on."""

from __future__ import annotations

import time
from typing import Any

import torch
from blind_injections import FAULTS, after_step, batches, cosine, fault, fire, gradients, model_built, random_ids, replace

from lit_llm.callbacks import Cosine
from lit_llm.models import experts
from lit_llm.models.gpt import GPT
from lit_llm.models.lora import Adapted
from lit_llm.training import language_model
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)
_CONTINUED = (
    "--init_from @/base-KIND --data TextFiles --data.train '@/train/*.txt' --data.val @/val.txt --data.global_batch_size 8 "
    "--data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json"
)

# fmt: off

@fault("lowercased_training", "b", "data", "the training text was lower-cased, the validation text was not",
    "training and validation text are prepared in different ways", "the model has never seen capital letters",
    wrong="overfitting: model too large for the data", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    for tensor in batch.values():
        tensor[(tensor >= 65) & (tensor <= 90)] += 32

@fault("bad_shard", "b", "data", "a stretch of the training data, from the half on, is random bytes: a corrupt shard",
    "garbage in a part of the data order", "a bad file is read between steps 100 and 150",
    wrong="rate too high: training diverged at step 100", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    if 0.5 <= at < 0.75:
        batch["input_ids"].copy_(random_ids(batch["input_ids"], 256, int(at * 1e6)))
        batch["targets"].copy_(batch["input_ids"].roll(-1, 1))

@fault("shifted_twice", "a", "labels", "the targets are shifted twice: each position predicts the token after the next one",
    "off by one in the targets", "data and loss both shift the labels", wrong="rate too low", place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"].copy_(batch["targets"].roll(-1, 1))
    batch["targets"][:, -1] = -100

@fault("targets_of_other_rows", "c", "labels", "inputs and targets do not belong together: each row has another row's targets",
    "inputs and labels were shuffled separately", "targets are unrelated to the inputs, so only frequencies are learned",
    wrong="dead layers: gradients vanish", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"].copy_(batch["targets"].roll(1, 0))

@fault("lines_as_documents", "b", "masks", "each line counts as a document, so attention sees no earlier line",
    "the end-of-document id is that of the newline", "the document mask cuts the context far too short",
    wrong="model too small", setup="--model.mask_documents true", place=replace(GPT, "view"))
def _(original: Any, self: Any, input_ids: Any, documents: Any = None, *args: Any, **kwargs: Any) -> Any:
    return original(self, input_ids, input_ids.eq(10).cumsum(1), *args, **kwargs)
fault("tight_softcap", "b", "model", "the soft cap of the logits is so low that no prediction can be confident",
    "logit_softcap too small", "logits are limited to a narrow range", wrong="noisy labels", flags="--model.logit_softcap 2")

@fault("heads_mixed_up", "c", "model", "the heads' outputs are reshaped without the transpose back, so positions are mixed",
    "missing transpose after attention", "attention outputs go to the wrong positions", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    def reshaped(module: Any, inputs: Any) -> Any:
        fire("reshape")
        return (inputs[0].unflatten(-1, (4, -1)).transpose(1, 2).reshape(inputs[0].shape),)
    for block in gpt.blocks:
        block.attention.project.register_forward_pre_hook(reshaped)

@fault("partly_loaded", "a", "initialisation", "of the initial checkpoint only embedding and head were loaded, not the blocks",
    "names do not match, and missing weights were ignored (strict=False)", "the blocks start from random weights",
    wrong="the rate is too high and destroys the pretrained weights", place=replace(language_model, "load_weights"),
    setup=f"{_CONTINUED} --schedule.warmup_steps 10")
def _(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    fresh = {name: p.clone() for name, p in model.blocks.state_dict().items()}
    original(model, *args, **kwargs)
    model.blocks.load_state_dict(fresh)

@fault("constant_init", "c", "initialisation", "all weights of a matrix start with the same value, so units stay alike",
    "symmetry is not broken", "constant initialisation of the linear layers", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.fill_(0.02)

fault("adamw_rate_low", "a", "optimizer", "the rate of AdamW's group, embedding and head, is far too low beside Muon's",
    "adamw_lr too small", "embedding and output matrix hardly move", wrong="model too small", flags="--optimizer.adamw_lr 1e-5")
fault("large_adam_eps", "c", "optimizer", "AdamW's epsilon is far larger than the gradients, so updates are tiny",
    "eps too large", "eps dominates the denominator of Adam", wrong="vanishing gradients", flags="--optimizer.eps 0.01")

@fault("cosine_rises_again", "b", "schedule", "the cosine's period is half of the run: the rate rises to its peak again",
    "T_max too short: the schedule goes on beyond its end", "the run ends at the largest rate instead of the smallest",
    wrong="bad data in the second half", setup="--optimizer.lr 8e-3", place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, t, peak) if t <= self.warmup_steps else peak * cosine(2 * t / self._total)

@fault("fp8_between_blocks", "a", "precision", "activations and gradients between blocks are in fp8, without any scaling",
    "the residual stream is rounded to a very narrow type", "gradients into the blocks underflow in fp8", wrong="rate too low",
    place=model_built)
def _(gpt: Any) -> None:
    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        fire("rounded")
        return output.to(torch.float8_e4m3fn).to(output.dtype)
    for block in gpt.blocks:
        block.register_forward_hook(rounded)

@fault("linear_8bit_moments", "b", "precision", "the optimizer's second moments are rounded to 8 bits with one scale a tensor",
    "8-bit optimizer state without blocks", "small second moments are rounded to zero, so those updates are huge",
    wrong="rate too high", place=after_step)
def _(module: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        v = state["exp_avg_sq"]
        unit = v.max().clamp(min=1e-30) / 255
        v.copy_((v / unit).round() * unit)
        fire("moments")

fault("batch_of_one", "a", "accumulation", "the batch is a single sequence: gradients are mostly noise", "batch far too small",
    "accumulation is missing, so each micro-batch is a step", wrong="rate too low", setup="--data.global_batch_size 16",
    flags="--data.global_batch_size 1")

@fault("never_zeroed", "c", "accumulation", "gradients are never set to zero, so they add up over all steps",
    "missing zero_grad", "each step uses the sum of all gradients so far", wrong="exploding gradients for want of clipping",
    place=lambda f: f())
def _() -> None:
    total: dict[Any, Any] = {}
    @gradients
    def add(module: Any, at: float) -> None:
        for p in module.parameters():
            total[p] = p.grad.add_(total.get(p, 0)).clone()

@fault("unequal_replicas", "c", "ranks", "the ranks have different weights: each was initialised by itself",
    "weights were not broadcast, seeds differ by rank", "replicas are out of sync", wrong="rate too high", ranks=2,
    place=replace(LanguageModel, "on_train_start"))
def _(original: Any, self: Any) -> None:
    original(self)
    if self.global_rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.global_rank)
            self.model.init_weights()

@fault("garbage_on_one_rank", "b", "ranks", "one rank's samples are garbage: its copy of the data is corrupt",
    "the data of rank 1 are not those of rank 0", "half of each batch is random tokens, those of one node",
    wrong="rate too low", ranks=2, place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    if rank == 1:
        batch["input_ids"].copy_(random_ids(batch["input_ids"], 256, int(at * 1e6)))
        batch["targets"].copy_(batch["input_ids"].roll(-1, 1))
    fire("rank")

@fault("detached_optimizer", "a", "resume", "after the resume the optimizer has other tensors than the model",
    "the model was replaced after the optimizer was made", "weights do not change after the resume",
    wrong="converged: the rate has decayed too far", resumed=True, place=replace(LanguageModel, "on_train_start"))
def _(original: Any, self: Any) -> None:
    original(self)
    optimizer = self.trainer.optimizers[0]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            copy = group["params"][i] = torch.nn.Parameter(p.detach().clone())
            if p in optimizer.state:
                optimizer.state[copy] = optimizer.state.pop(p)

@fault("blocks_reordered", "c", "resume", "the resumed weights have the blocks in another order",
    "the conversion of the checkpoint sorted layers wrongly", "first and last block are exchanged at the resume",
    wrong="the optimizer's state was lost", resumed=True, place=replace(LanguageModel, "on_train_start"))
def _(original: Any, self: Any) -> None:
    first, last = self.model.blocks[0], self.model.blocks[-1]
    before = {name: p.clone() for name, p in first.state_dict().items()}
    first.load_state_dict(last.state_dict())
    last.load_state_dict(before)
    original(self)

@fault("padded_validation", "a", "evaluation", "half of each validation sequence is padding, and padding counts in the loss",
    "padding is not masked in validation", "validation measures tokens that training never has", wrong="overfitting",
    place=batches("val"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["input_ids"][:, 48:] = 0
    batch["targets"][:, 47:] = 0

@fault("stale_validation", "b", "evaluation", "validation always measures the weights of the first validation",
    "validation uses an old copy of the model", "the copy of the model that is evaluated is never refreshed",
    wrong="overfitting: stop early", place=lambda f: f())
def _() -> None:
    first: list[Any] = []
    @replace(LanguageModel, "validation_step")
    def validation_step(original: Any, self: Any, *args: Any) -> None:
        own = list(self.model.parameters())
        now = [p.detach().clone() for p in own]
        first.extend([] if first else now)
        with torch.no_grad():
            for p, value in zip(own, first, strict=True):
                p.copy_(value)
            original(self, *args)
            for p, value in zip(own, now, strict=True):
                p.copy_(value)

@fault("periodic_stalls", "a", "loader", "the loader stalls for seconds every 20 batches: reading a shard blocks training",
    "slow storage: no read-ahead", "training waits for data in some steps", wrong="validation takes too long",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    fire("stall")
    if round(at * 200) % 20 == 19:
        time.sleep(2.5)

@fault("reused_buffer", "c", "loader", "all rows of a batch are the same sample: the loader overwrites its buffer",
    "rows share memory when they are collated", "the effective batch is one sequence", wrong="rate too high",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    for tensor in batch.values():
        tensor.copy_(tensor[-1:].clone().expand_as(tensor))

@fault("other_tokenizer", "a", "chats", "the chats' tokenizer is not the one of the base model: ids mean other tokens",
    "vocabularies are mixed up", "ids do not fit the pretrained embedding", wrong="rate too high for fine-tuning", setup="CHAT",
    place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    other = torch.randperm(1024, generator=torch.Generator().manual_seed(5))
    for ids in (batch["input_ids"], batch["targets"]):
        ids.copy_(torch.where((ids >= 0) & (ids < 1024), other[ids.clamp(0, 1023)], ids))

@fault("inverted_mask", "c", "chats", "the mask is inverted: the questions are learned, and the answers are not",
    "loss on the user's turns instead of the assistant's", "answers are masked out", wrong="overfitting", setup="CHAT",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    counted = targets != -100
    before_answer = counted.flip(1).cumsum(1).flip(1) > 0
    targets.copy_(torch.where(before_answer & ~counted, ids.roll(-1, 1), -100))

fault("large_alpha", "b", "LoRA", "alpha is far too large for the rank: the adapters' updates are scaled by hundreds",
    "scale alpha / rank too high", "adapters change the model too strongly", wrong="bad chats: noisy answers",
    setup="CHAT --lora.rank 8 --optimizer.lr 2e-3", flags="--lora.alpha 4000")

@fault("zero_adapters", "c", "LoRA", "both factors of the adapters start at zero, so neither gets a gradient",
    "A is zero as well as B", "the adapters do not learn: their gradients are exactly zero", wrong="rate too low",
    setup="CHAT --lora.rank 8 --optimizer.lr 5e-3", place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.modules():
        if isinstance(module, Adapted):
            module.lora_a.zero_()

@fault("outputs_not_sorted_back", "a", "experts", "the experts' outputs go to other tokens: they are not sorted back",
    "the permutation is applied instead of its inverse", "tokens get the expert outputs of other tokens",
    wrong="collapsed routing", setup="MOE", place=replace(experts.Reordered, "apply"))
def _(original: Any, made: Any, back: Any, order: Any) -> Any:
    return original(made, order, back)

@fault("labels_by_chance", "b", "preferences", "which answer of a pair is chosen is random in the training pairs",
    "label noise in the preferences", "annotations do not agree with the answers", wrong="beta too small", setup="PAIRS",
    place=replace(Preference, "of_documents"))
def _(original: Any, self: Any, logp: Any, tokens: Any, reference: Any = None) -> Any:
    if reference is None or not torch.is_grad_enabled():
        return original(self, logp, tokens, reference)
    pairs = (reference.unflatten(1, (-1, 2)).sum(2, keepdim=True) * 1e4).long() % 2 == 1  # the same for a pair in each pass
    def swap(x: Any) -> Any:
        x = x.unflatten(1, (-1, 2))
        return torch.where(pairs, x.flip(2), x).flatten(1)
    return original(self, swap(logp), swap(tokens), swap(reference))
# fmt: on

SECOND = frozenset(FAULTS) - _BEFORE
