"""The fifth exam of `doctor`, second author: the sealed half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from blind_injections import FAULTS, after_step, batches, fault, fire, in_order, model_built, replace, seed_of
from torch import Tensor

from lit_llm.models.lora import Adapted
from lit_llm.models.router import Router
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.training.evaluation import Evaluation
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

_BEFORE = frozenset(FAULTS)

# fmt: off

# -- kind a ----------------------------------------------------------------------------------------------------------------


@fault("files-in-order", "a", "loader",
    "The training data are not shuffled: batches are consecutive passages of one file, read file after file.",
    "shuffle is off", "blocks are read in the order of the text", "the samples of a batch are correlated",
    "neighbouring steps read the same file",
    wrong="The learning rate is too high, or single documents are damaged.",
    place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return g % samples


fault("warmup-of-a-long-run", "a", "schedule",
    "The warmup is longer than the run: it comes from a schedule for many more steps, so the rate never gets near its peak.",
    "the learning rate is too low because warmup never ends", "the schedule is made for a run ten or a hundred times as long",
    "warmup_steps and total_steps do not fit max_steps",
    wrong="The peak rate itself is too low, or the model is too small.",
    flags="--schedule.warmup_steps 2000 --schedule.total_steps 20000")


@fault("convolution-sees-ahead", "a", "model",
    "The short convolutions are not causal: they read the next position, and so the token that is to be predicted.",
    "the model sees its targets", "leak of the future through the convolution's padding", "a convolution has same padding",
    "the loss is too good because of a causal leak",
    wrong="Validation text is in the training text, or the data are trivial.")
def _() -> None:
    @replace(ShortConvolution, "forward")
    def forward(original: Any, self: Any, x: Tensor, documents: Any = None, cache: Any = None, shard: Any = None) -> Tensor:
        if documents is not None or cache is not None:
            return original(self, x, documents, cache, shard)
        longer = F.pad(x, (0, 0, 0, 1))
        return x + (original(self, longer, None, None, shard) - longer)[:, 1:]


@fault("padding-in-the-mean", "a", "evaluation",
    "The validation loss is divided by all positions, although questions and padding have no loss, so it is far too low.",
    "the mean of the validation loss counts ignored targets", "val/loss has the wrong denominator",
    "validation averages over masked tokens, training does not",
    wrong="The model generalises better than it fits, or validation conversations are in the training data.",
    setup="CHAT")
def _() -> None:
    @replace(Evaluation, "update")
    def update(original: Any, self: Any, batch: Any, sums: Any, **more: Any) -> None:
        original(self, batch, sums._replace(count=torch.full_like(sums.count, batch["targets"].numel())), **more)


@fault("node-with-other-tokens", "a", "ranks",
    "One rank reads tokens that another tokenizer made, so half of each batch is nonsense to the model.",
    "the data of one rank are corrupt", "ranks have different token ids for the same text",
    "one node's copy of the data does not fit the tokenizer",
    wrong="The learning rate is too high or too low, or gradients are not averaged over the ranks.",
    ranks=2,
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    fire("ranks")  # rank 0 has no other sign that it took effect
    if rank == 1:
        other = torch.randperm(1000, generator=torch.Generator().manual_seed(8))
        for tensor in (batch["input_ids"], batch["targets"]):
            known = (tensor >= 0) & (tensor < 1000)
            tensor[:] = torch.where(known, other[tensor.clamp(0, 999)], tensor)


# -- kind b ----------------------------------------------------------------------------------------------------------------


@fault("eight-bit-weights", "b", "precision",
    "The weights are rounded to eight-bit floats after each step, without a copy in fp32, so small updates are lost.",
    "there are no fp32 master weights", "precision of the stored weights is too low", "updates are lost to rounding",
    wrong="The learning rate is too low.",
    place=after_step)
def _(module: Any, optimizer: Any) -> None:
    for p in module.parameters():
        if p.ndim > 1:
            scale = 448 / p.abs().max().clamp(min=1e-12)
            p.copy_((p * scale).to(torch.float8_e4m3fn).float() / scale)


@fault("block-not-restored", "b", "resume",
    "The resumed run lost the weights of its blocks: their names did not match the checkpoint, so they start from new ones.",
    "a part of the model was initialised again at the resume", "load_state_dict with strict=False skipped the blocks",
    "weights were not restored from the checkpoint",
    wrong="The learning rate or the data changed at the resume.",
    resumed=True)
def _() -> None:
    @replace(LanguageModel, "on_train_start")
    def on_train_start(original: Any, self: Any) -> None:
        original(self)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in self.model.blocks.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=p.size(-1) ** -0.5, generator=generator)
                    p.mul_(0.0 if name.endswith(".project.weight") else 1.0)
                elif name.endswith("norm.weight"):
                    p.fill_(1.0)


@fault("experts-without-optimizer", "b", "experts",
    "The experts' weights are in no group of the optimizer, so they never change.",
    "the optimizer leaves out the experts", "the experts are not trained", "the expert weights stay at their initial values",
    "parameter groups take matrices of two dimensions only",
    wrong="The router has collapsed, or the balancing loss is too strong.",
    setup="MOE")
def _() -> None:
    @replace(LanguageModel, "configure_optimizers")
    def configure_optimizers(original: Any, self: Any) -> Any:
        optimizer = original(self)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["name"] != "experts"]
        return optimizer


@fault("lines-joined", "b", "data",
    "The training text lost its line breaks in cleaning, and the validation text has them.",
    "newlines were replaced with spaces in the training data", "train and validation text were cleaned differently",
    "whitespace was normalised in training only", "a token of the validation text never occurs in training",
    wrong="The model overfits: it needs more regularisation or fewer steps.",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    for tensor in (batch["input_ids"], batch["targets"]):
        tensor.masked_fill_(tensor == ord("\n"), ord(" "))


@fault("padding-learned", "b", "masks",
    "Padding counts as a target: more than half of each training row is padding, and the model learns to predict it.",
    "padding is not masked out of the training loss", "most of the batch is one filler token",
    "the training loss is low because it includes padding",
    wrong="The training text is too easy, or the model overfits.",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    rows, length = ids.shape
    ends = torch.randint(length // 5, length * 3 // 5, (rows, 1), generator=torch.Generator().manual_seed(seed_of(batch)))
    place = torch.arange(length)
    ids.masked_fill_(place >= ends, 0)
    targets.masked_fill_(place >= ends - 1, 0)


# -- kind c ----------------------------------------------------------------------------------------------------------------


@fault("reference-is-the-policy", "c", "preferences",
    "The reference is the model that is trained, not a frozen copy of its start, so the preference loss stays at ln 2.",
    "the reference model shares weights with the policy", "the reference moves with training",
    "log-ratios are always zero because policy and reference are the same",
    wrong="The learning rate or beta is too small, so nothing is learned.",
    setup="PAIRS --optimizer.lr 1e-3")
def _() -> None:
    @replace(Preference, "of_documents")
    def of_documents(original: Any, self: Any, logp: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Any:
        return original(self, logp, tokens, logp.detach())


@fault("adapters-start-at-zero", "c", "LoRA",
    "Both matrices of each adapter start at zero, so neither gets a gradient and nothing is trained.",
    "LoRA's A and B are both initialised with zeros", "the adapters get no gradient", "the adapters never leave zero",
    wrong="The learning rate or alpha is too small.",
    setup="CHAT --lora.rank 8 --lora.alpha 16",
    place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.modules():
        if isinstance(module, Adapted):
            module.lora_a.zero_()


@fault("end-not-learned", "c", "chats",
    "The end of the assistant's turn is no target in training, so the model never learns to stop.",
    "the end-of-turn token is masked", "the last token of each answer is ignored in training",
    "training and validation count different tokens of an answer: the end is missing",
    wrong="The model overfits the conversations.",
    setup="CHAT",
    place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    counted = batch["targets"] != -100
    goes_on = F.pad(counted[:, 1:], (0, 1))
    batch["targets"].masked_fill_(counted & ~goes_on, -100)


@fault("debug-subset", "c", "loader",
    "Training reads the same few blocks again and again, because the limit of a debug run was left in, and so overfits them.",
    "the data loader repeats a small subset", "the training data are only a few thousand tokens, seen many times",
    "overfitting: far too little distinct data is read",
    wrong="The validation text is of another kind than the training text.",
    place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return g % min(64, samples)


@fault("tokens-over-capacity", "c", "experts",
    "The capacity of the experts is far too small, so most tokens are dropped and pass no expert.",
    "tokens are dropped by the router's capacity", "capacity is computed from one sequence, not from the whole micro-batch",
    "most tokens skip the MLP", "the outputs of the experts are zero for most tokens",
    wrong="The router has collapsed onto a few experts, or the balancing loss is missing.",
    setup="MOE --model.moe.expert_width 192")
def _() -> None:
    @replace(Router, "forward")
    def forward(original: Any, self: Any, x: Tensor) -> Any:
        routing = original(self, x)
        config = self.config
        is_sent = F.one_hot(routing.experts, config.experts)  # (N, k, E)
        place = is_sent.sum(dim=1).cumsum(dim=0).gather(1, routing.experts)  # (N, k): the number of a token at its expert
        capacity = min(96, len(x)) * config.top_k // config.experts
        return routing._replace(weights=routing.weights * (place <= capacity))


# fmt: on

NAMES = frozenset(FAULTS) - _BEFORE
