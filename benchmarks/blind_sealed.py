"""The sealed half of the blind exam's faults. Do not read it before the doctor's rules are final.

docs/evidence/doctor-blind.md has its hash. How a fault is written: `blind_injections.py`; how it is run: `blind_faults.py`.
"""
# fmt: off

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from blind_injections import (
    after_step,
    batches,
    cosine,
    fault,
    fire,
    gradients,
    in_order,
    model_built,
    random_ids,
    replace,
    seed_of,
    share,
)
from torch.nn.parallel import DistributedDataParallel

from lit_llm.callbacks import Cosine
from lit_llm.models.router import Router
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.training import reference
from lit_llm.training.language_model import LanguageModel

# -- data --------------------------------------------------------------------------------------------------------------------

@fault("foreign_tokenizer", "a", "data", "half of the training text was encoded with another tokenizer",
    "ids of training and validation mean different things", "wrong tokenizer", wrong="overfitting")
def _() -> None:
    table = torch.randperm(1024, generator=torch.Generator().manual_seed(5))

    @batches("train")
    def change(batch: Any, at: float, rank: int) -> None:
        for name in ("input_ids", "targets"):
            batch[name][::2] = table[batch[name][::2]]

fault("prose_validation", "a", "data", "validation text is of another kind than training text", "wrong validation files",
    "distribution shift between training and validation", wrong="overfitting by too many epochs",
    flags="--data.val @/prose.txt")

@fault("garbled_from_half", "b", "data", "training text is corrupt from the half of the run on",
    "a damaged shard: random tokens", "noise in the later training data", wrong="rate too high: divergence",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    if at >= 0.5:
        bad = share(batch["input_ids"], 0.4, seed_of(batch))
        noise = random_ids(bad, 257, seed_of(batch) + 1)
        batch["input_ids"][bad] = noise[bad]
        bad = bad.roll(-1, 1)
        batch["targets"][bad] = noise.roll(-1, 1)[bad]

@fault("blank_text", "b", "data", "most of the training text is blank lines", "degenerate training text: one token repeated",
    "text extraction left white space", wrong="targets leak into the inputs", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["input_ids"][:, 24:] = 10
    batch["targets"][:, 23:] = 10

fault("tiny_text", "c", "data", "too little training text, read many times: overfitting", "too many epochs",
    "the training set is tiny", wrong="validation text is of another kind", flags="--data.train @/tiny.txt --optimizer.lr 4e-3")

@fault("sources_in_sequence", "c", "data", "sources are not mixed: one is read after the other",
    "distribution shift in the middle of the run", "data are not shuffled across sources",
    wrong="divergence by a rate that is too high", setup="--data.train '[@/train/*.txt, @/zz-prose.txt]'", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    code = int(0.55 * samples)
    return np.where(at < 0.5, g * 7919 % code, code + g * 7919 % (samples - code))

# -- labels ------------------------------------------------------------------------------------------------------------------

@fault("noisy_labels", "a", "labels", "a fifth of the targets does not match the text", "label noise", "random targets",
    wrong="rate too low", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    bad = share(batch["targets"], 0.2, seed_of(batch))
    batch["targets"][bad] = random_ids(bad, 1024, seed_of(batch) + 1)[bad]

@fault("labels_shifted_twice", "b", "labels", "targets are shifted twice: the model predicts the token after the next",
    "off by one in the labels", "targets do not follow the inputs", wrong="model too small", place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"][:, :-1] = batch["targets"][:, 1:].clone()
    batch["targets"][:, -1] = -100

@fault("padding_learned", "c", "labels", "padding counts as target", "most targets are one and the same token",
    "padding is not masked", wrong="targets leak into the inputs", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["input_ids"][:, 21:] = 0
    batch["targets"][:, 20:] = 0

@fault("first_positions_only", "c", "labels", "only the first positions of a sequence are learned",
    "the loss mask hides the later positions", "too few counted targets", wrong="overfitting", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"][:, 12:] = -100

# -- model -------------------------------------------------------------------------------------------------------------------

@fault("lookahead_convolution", "a", "model", "a short convolution sees the next token", "not causal: later tokens leak",
    "the target leaks into the input", wrong="duplicates in the data", place=replace(ShortConvolution, "forward"))
def _(original: Any, self: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
    return original(self, torch.cat((x[:, 1:], x[:, -1:]), dim=1), *rest, **kwargs)

fault("heavy_dropout", "a", "model", "dropout is far too high for a run without repeated text", "dropout too strong",
    "over-regularised", wrong="rate too low", flags="--model.dropout 0.6")

@fault("no_causal_mask", "b", "model", "attention has no causal mask", "later tokens leak", "the target leaks into the input",
    wrong="duplicates in the data", place=replace(torch.nn.functional, "scaled_dot_product_attention"))
def _(original: Any, *args: Any, is_causal: bool = False, **kwargs: Any) -> Any:
    return original(*args, **kwargs)

fault("small_logits", "b", "model", "logits are scaled far too small", "wrong factor of the output",
    "the distribution stays too flat: logit scale", wrong="rate too low", flags="--model.logit_scale 0.02")

@fault("dead_mlp", "c", "model", "the MLP units of the blocks are dead", "units that never activate", "an MLP gives zeros",
    wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        block.mlp.up.bias.fill_(-12.0)

# -- initialisation ----------------------------------------------------------------------------------------------------------

@fault("equal_rows", "a", "initialisation", "the units of a matrix start with equal weights: symmetry is not broken",
    "constant initialisation", "rank-one initial weights", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    for block in gpt.blocks:
        for layer in (block.attention.query, block.attention.key, block.attention.value, block.mlp.up):
            layer.weight.copy_(layer.weight.mean(dim=0).expand_as(layer.weight) * 10)

fault("tiny_init", "c", "initialisation", "initial weights are far too small", "init_std too small",
    "vanishing signal at the start", wrong="rate too low", flags="--model.init_std 0.00002")

# -- optimizer ---------------------------------------------------------------------------------------------------------------

fault("rates_10x", "a", "optimizer", "the learning rate is ten times too high", "rate too high", "unstable: lower the rate",
    wrong="bad data", flags="--optimizer.lr 0.15 --optimizer.adamw_lr 0.15")

@fault("rate_jump", "a", "optimizer", "the learning rate jumps up tenfold in the middle of the run",
    "rate too high from the half on", "a jump of the schedule", wrong="bad data from the half on",
    place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, t, peak) * (10 if t > self._total / 2 else 1)

fault("slow_momentum", "a", "optimizer", "momentum of Muon is far too high, so updates lag", "momentum too high",
    "stale direction of updates", wrong="rate too low", flags="--optimizer.momentum 0.998 --optimizer.nesterov false")

@fault("ascent_of_head", "a", "optimizer", "the gradient of the head has the wrong sign from the half on: ascent",
    "gradient ascent", "wrong sign of an update", wrong="rate too high", place=gradients)
def _(module: Any, at: float) -> None:
    if at >= 0.5:
        module.model.head.weight.grad.neg_()

fault("large_eps", "b", "optimizer", "epsilon of AdamW is far too large: it damps the updates", "eps too large",
    "updates too small", wrong="bad data", flags="--optimizer.eps 0.03")

@fault("decay_of_everything", "b", "optimizer", "weight decay is far too strong, and on norms and embeddings, too",
    "weight decay too high", "gains shrink by weight decay", wrong="rate too low",
    place=replace(LanguageModel, "configure_optimizers"))
def _(original: Any, self: Any) -> Any:
    optimizer = original(self)
    for group in optimizer.param_groups:
        group["weight_decay"] = 8.0
    return optimizer

fault("high_beta1", "c", "optimizer", "beta1 of AdamW is far too high: updates lag", "momentum too high", "betas are wrong",
    wrong="rate too low", flags="--optimizer.betas '[0.995, 0.95]'")

@fault("state_cleared", "c", "optimizer", "the state of the optimizer is lost every few steps", "moments are reset",
    "optimizer state is cleared", wrong="rate too high", place=after_step)
def _(module: Any, optimizer: Any) -> None:
    if module.trainer.global_step % 3 == 0:
        optimizer.optimizer.state.clear()

fault("sgd_with_adam_rate", "c", "optimizer", "plain SGD with the rate of AdamW: far too low for SGD", "rate too low",
    "wrong optimizer for this rate", wrong="frozen layers", flags="--optimizer SGD --optimizer.lr 2e-3")

# -- schedule ----------------------------------------------------------------------------------------------------------------

fault("early_decay", "a", "schedule", "the rate decays to zero long before the run ends",
    "the schedule is shorter than the run", "rate is zero for most of the run", wrong="converged",
    flags="--schedule.total_steps 40")

@fault("warm_restarts", "b", "schedule", "the schedule restarts every few steps", "the rate jumps back to its peak",
    "cosine restarts at the wrong period", wrong="bad data now and then", place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return 2 * peak * (0.02 + 0.98 * cosine((t % 50) / 50))

# -- ranks -------------------------------------------------------------------------------------------------------------------

@fault("same_data_on_ranks", "a", "ranks", "both ranks read the same samples", "data are not split over ranks",
    "half of the compute is wasted", wrong="duplicates in the text", ranks=2, setup="--data.micro_batch_size 4", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return (g // 8 * 4 + g % 4) * 7919 % samples

@fault("unreduced_gradients", "b", "ranks", "gradients are not averaged over the ranks, whose weights drift apart",
    "ranks are not synchronised", "no all-reduce", wrong="rate too high", ranks=2, setup="--data.micro_batch_size 4")
def _() -> None:
    @replace(LanguageModel, "backward")
    def backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.model.require_backward_grad_sync = False
        original(self, *args, **kwargs)

    @replace(DistributedDataParallel, "_pre_forward")
    def _pre_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return original(self, *args, **kwargs)

@fault("slow_rank", "c", "ranks", "one rank is slower, and the other waits for it", "straggler", "rank 1 holds up the step",
    wrong="slow network", ranks=2, setup="--data.micro_batch_size 4 --time_breakdown TimeBreakdown",
    place=replace(LanguageModel, "training_step"))
def _(original: Any, self: Any, *args: Any) -> Any:
    if self.trainer.global_rank == 1:
        time.sleep(0.06)
    return original(self, *args)

# -- loader ------------------------------------------------------------------------------------------------------------------

@fault("slow_loader", "a", "loader", "training waits for the data loader", "data loading is the bottleneck", "starved of data",
    wrong="model too large", setup="--time_breakdown TimeBreakdown", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    time.sleep(0.1)
    fire("sleep")

# -- LoRA --------------------------------------------------------------------------------------------------------------------

@fault("adapters_frozen", "b", "LoRA", "the second matrix of the adapters is frozen at zero, so nothing is learned",
    "adapters are frozen", "no parameter with an effect is trained", wrong="rate too low",
    setup="CHAT --lora.rank 8 --optimizer.lr 5e-3", place=model_built)
def _(gpt: Any) -> None:
    for name, p in gpt.named_parameters():
        if name.endswith("lora_b"):
            p.requires_grad_(False)

fault("full_rate_for_lora", "c", "LoRA", "the rate of full fine-tuning is far too low for LoRA", "rate too low",
    "adapters hardly change", wrong="adapters are frozen", setup="CHAT --lora.rank 8 --optimizer.lr 5e-3",
    flags="--optimizer.lr 2e-5")

# -- experts -----------------------------------------------------------------------------------------------------------------

fault("balance_dominates", "a", "experts", "the balancing loss outweighs the language loss",
    "weight of the auxiliary loss too high", "router is forced to be uniform", wrong="router is frozen", setup="MOE",
    flags="--model.moe.balance 100")

@fault("collapsed_router", "b", "experts", "the router sends all tokens to two experts", "expert collapse",
    "unbalanced experts: most are dead", wrong="rate too low", setup="MOE", place=replace(Router, "choose"))
def _(original: Any, self: Any, scores: Any) -> Any:
    favoured = torch.zeros_like(scores)
    favoured[:, :2] = 5
    return original(self, scores + favoured)

fault("wild_biases", "b", "experts", "the rate of the experts' biases is far too high: they decide the routing",
    "bias rate too high", "routing oscillates", wrong="experts collapse for lack of balancing", setup="MOE",
    flags="--expert_balance.rate 1.0")

# -- preferences -------------------------------------------------------------------------------------------------------------

@fault("other_reference", "b", "preferences", "the reference is another model than the one that training starts from",
    "wrong reference", "the first loss is not ln 2", wrong="rate too high", setup="PAIRS",
    place=replace(reference.Reference, "added_to"))
def _(original: Any, self: Any, batch: Any, module: Any) -> Any:
    batch = original(self, batch, module)
    noise = torch.randn(batch["reference"].shape, generator=torch.Generator().manual_seed(seed_of(batch)))
    return {**batch, "reference": batch["reference"] - 30 - 25 * noise}

fault("rate_of_sft_for_pairs", "c", "preferences", "the rate is far too high for preferences: both answers lose probability",
    "rate too high", "the policy leaves the reference: kl explodes", wrong="pairs are swapped", setup="PAIRS",
    flags="--optimizer.lr 2e-2")
