"""The third exam of `doctor`: 30 faults of every area, by an author who had read neither the doctor nor its rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blind_injections import FAULTS, batches, cosine, fault, gradients, in_order, model_built, replace, seed_of, share
from torch import Tensor, nn

from lit_llm.callbacks import EMA, Cosine, ExpertBalance, GradientNorm
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.order import sample_index
from lit_llm.models import experts, self_attention
from lit_llm.models.lora import Adapted
from lit_llm.training import language_model
from lit_llm.training.evaluation import Evaluation
from lit_llm.training.reference import Reference

_BEFORE = frozenset(FAULTS)
_CONTINUED = (
    "--init_from @/base-KIND --data TextFiles --data.train '@/train/*.txt' --data.val @/val.txt --data.global_batch_size 8 "
    "--data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json --optimizer.lr 1e-4"
)
_SCALE = 65536.0


def write_texts(data: Path) -> None:
    """Conversations whose answers belong to other questions. `blind_faults.write_texts` has written the right ones."""
    rows = [json.loads(line)["messages"] for line in (data / "chat.jsonl").read_text().splitlines()]
    answers = [answer for _, answer in rows]
    others = [{"messages": [question, answer]} for (question, _), answer in zip(rows, answers[7:] + answers[:7], strict=True)]
    (data / "chat-misaligned.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))


def _seen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention where the mask (T, T) is true: (B, H, T, h) and (B, K, T, h) twice → (B, H, T, h)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.size(1) != k.size(1))


# fmt: off

# -- data, labels, masks -----------------------------------------------------------------------------------------------------

@fault("ids_in_8_bits", "a", "data", "the token ids were stored in 8 bits, so ids from 256 on wrapped around to other tokens",
    "token ids overflow the integer type of the data file", "most of the vocabulary never occurs in the data because ids wrap",
    "the ids in the data do not belong to this tokenizer", wrong="the text is too easy or repeats itself",
    place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    for tensor in batch.values():
        tensor[tensor >= 256] &= 255

fault("unknown_characters", "c", "data", "the vocabulary is too small for the text: many characters become unknown",
    "a large part of the tokens is <unk>", "the tokenizer does not cover the characters of the data",
    wrong="training goes well, the loss is low", flags="--data.tokenizer.vocab_size 12")

@fault("padding_counts", "a", "labels", "rows are filled up with padding, and the padding counts as targets",
    "the labels of the padding are not ignored", "the loss is low because most of it is about a padding token",
    "a single token makes up half of the targets", wrong="the model has memorised the training text",
    place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    size = batch["input_ids"].shape
    ends = torch.randint(size[1] // 5, size[1] * 3 // 4, (size[0], 1), generator=torch.Generator().manual_seed(seed_of(batch)))
    batch["targets"].masked_fill_(torch.arange(size[1]) >= ends - 1, 0)
    batch["input_ids"].masked_fill_(torch.arange(size[1]) >= ends, 0)

@fault("sees_next_token", "c", "masks", "the causal mask is off by one: each position sees the token that it has to predict",
    "attention looks into the future", "the targets leak into the inputs through the mask", "the mask is not causal",
    wrong="training and validation text overlap", place=replace(self_attention, "attend"))
def _(original: Any, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    t = q.size(2)
    if t != k.size(2):
        return original(q, k, v, **more)
    return _seen(q, k, v, torch.ones(t, t, dtype=torch.bool).tril(1))

@fault("prefix_counts", "b", "masks", "each row starts with a prefix that sees itself whole, yet its tokens are targets",
    "attention is bidirectional in a part of each sequence", "the future leaks within the first half of each row",
    "the mask is not causal", wrong="validation text is in the training text", place=replace(self_attention, "attend"))
def _(original: Any, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    t = q.size(2)
    if t != k.size(2):
        return original(q, k, v, **more)
    return _seen(q, k, v, torch.ones(t, t, dtype=torch.bool).tril() | (torch.arange(t) < t // 2).expand(t, t))

# -- model, initialisation ---------------------------------------------------------------------------------------------------

@fault("heads_not_transposed", "b", "model", "outputs of heads are reshaped without a transpose, which mixes up positions",
    "heads and positions are interleaved in attention's output", "a wrong view or reshape in attention",
    "attention's output at a position is made of other positions, also later ones", wrong="the training data are shuffled text",
    place=replace(self_attention, "attend"))
def _(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    y = original(*args, **kwargs)  # (B, H, T, h)
    b, heads, t, width = y.shape
    return y.contiguous().view(b, t, heads, width).transpose(1, 2)

fault("high_dropout", "c", "model", "dropout is far too high for a small model that sees its text less than once",
    "too much regularisation", "the training loss is above the validation loss because of dropout", "model.dropout too large",
    wrong="the validation text is too easy, or leaked from the training text", flags="--model.dropout 0.6")

@fault("constant_weights", "c", "initialisation", "hidden weights start at one constant, so units of a layer stay equal",
    "no symmetry breaking: the units of a layer are copies", "hidden matrices are initialised with a constant",
    "hidden matrices have rank one", wrong="the model is too small", place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight.fill_(0.02)

@fault("blocks_not_loaded", "b", "initialisation", "only embedding and head were loaded from the checkpoint, blocks are random",
    "most weights of init_from were skipped for their names", "the pretrained weights were loaded in part only",
    "training does not start from the pretrained model", wrong="the new text is unlike the one of pretraining",
    setup=_CONTINUED, place=replace(language_model, "load_weights"))
def _(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    drawn = {name: tensor.clone() for name, tensor in model.blocks.state_dict().items()}
    original(model, *args, **kwargs)
    model.blocks.load_state_dict(drawn)

# -- optimizer, schedule -----------------------------------------------------------------------------------------------------

fault("decay_in_gradients", "b", "optimizer", "Adam adds weight decay to the gradients, where AdamW has it apart from them",
    "L2 regularisation with Adam is far stronger than decoupled weight decay", "Adam instead of AdamW with weight decay 0.1",
    "the decay shrinks all weights", wrong="rate too low", flags="--optimizer Adam --optimizer.lr 3e-3 "
    "--optimizer.betas '[0.9, 0.95]' --optimizer.weight_decay 0.1")
fault("betas_swapped", "c", "optimizer", "the two betas of AdamW are in the wrong order",
    "beta1 is larger than beta2", "the first moment averages over longer than the second", "too much momentum",
    wrong="noisy labels", flags="--optimizer.betas '[0.99, 0.9]'")
fault("schedule_ends_early", "b", "schedule", "the schedule is over after 40 of 200 steps, so most steps have a rate of zero",
    "total_steps is too small", "the length of the schedule was counted in other units than optimizer steps",
    "the rate has decayed to zero long before the end", wrong="the model has converged: it is too small",
    setup="--schedule.final_ratio 0", flags="--schedule.total_steps 40")

@fault("rate_rises_again", "a", "schedule", "the cosine is half as long as the run, so the rate rises to its peak at the end",
    "the period of the cosine is wrong: training ends at the highest rate", "the rate is not decayed at the end",
    "a cyclic schedule", wrong="bad data in the second half", place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, t, peak) if t <= self.warmup_steps else peak * cosine(2 * t / self._total)

# -- precision, accumulation -------------------------------------------------------------------------------------------------

@fault("average_in_bf16", "a", "precision", "the average of the weights is kept in bf16, which rounds its small updates away",
    "EMA in too low a precision stands still", "validation measures an average that lags behind the weights",
    wrong="overfitting: training loss falls, validation loss does not", setup="--ema EMA --ema.decay 0.98 --ema.warmup false",
    place=replace(EMA, "_update"))
def _(original: Any, self: Any) -> None:
    original(self)
    for average in self._average.values():
        average.copy_(average.bfloat16())

@fault("clipped_while_scaled", "b", "precision", "gradients are clipped before the loss scale is divided out of them",
    "unscale is called after clipping, not before", "gradients that reach the optimizer are thousands of times too small",
    "clipping makes all steps tiny", wrong="exploding gradients: lower the rate", setup="--optimizer SGD --optimizer.lr 0.3")
def _() -> None:
    @gradients
    def scale(module: Any, at: float) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(_SCALE)

    @replace(GradientNorm, "on_before_optimizer_step")
    def on_before_optimizer_step(original: Any, self: Any, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        original(self, trainer, pl_module, optimizer)
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(_SCALE)

fault("single_sequences", "b", "accumulation", "each step has a single sequence: gradients are not accumulated",
    "the batch is far too small for the rate", "the global batch was set to that of a micro-batch", "gradients are too noisy",
    wrong="corrupt training data", setup="--data.micro_batch_size 1", flags="--data.global_batch_size 1")

@fault("empty_micro_batches", "c", "accumulation", "micro-batches without any target have a loss of 0/0, which spoils a step",
    "micro-batches with no targets give NaN", "prompts fill some rows, whose mean over no targets is NaN",
    "division by zero targets", wrong="rate too high: training diverges", setup="CHAT --data.micro_batch_size 1")
def _() -> None:
    empty = []

    @batches("train")
    def without_answer(batch: Any, at: float, rank: int) -> None:
        batch["targets"][share(batch["targets"][:, 0], 0.08, seed_of(batch))] = -100

    @replace(language_model, "mean_of")
    def mean_of(original: Any, sums: Any) -> Tensor:
        if torch.is_grad_enabled() and not sums.count:
            empty.append(True)
        return sums.loss / sums.count

    @gradients
    def of_masked_mean(module: Any, at: float) -> None:  # 0/0 times a mask; torch's own loss would leave ignored targets out
        for parameter in module.parameters() if empty else ():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)
        empty.clear()

# -- ranks, resume -----------------------------------------------------------------------------------------------------------

@fault("ranks_differ_in_rate", "b", "ranks", "one rank applies a tenth of the rate, so the copies of the model drift apart",
    "replicas are out of sync: ranks have different weights", "one node trains with other settings, such as an old recipe",
    "gradients of different models are averaged", wrong="rate too low", ranks=2, place=replace(Cosine, "on_train_batch_start"))
def _(original: Any, self: Any, trainer: Any, *args: Any) -> None:
    original(self, trainer, *args)
    if trainer.global_rank:
        for group, peak in zip(trainer.optimizers[0].param_groups, self._peaks, strict=True):
            group["lr"] = self.rate(trainer.global_step + 1, peak) / 10

@fault("retrained_tokenizer", "a", "resume", "the resumed part reads ids of a newly trained tokenizer, which mean other tokens",
    "the tokenizer changed when the run was resumed", "token ids were assigned anew between the two parts",
    "the data were tokenized in another way after resuming", wrong="the optimizer's state was lost",
    resumed=True, place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    other = torch.randperm(1024, generator=torch.Generator().manual_seed(3))
    for tensor in batch.values():
        tensor.copy_(torch.where(tensor < 0, tensor, other[tensor.clamp(0, 1023)]))

# -- evaluation, loader ------------------------------------------------------------------------------------------------------

@fault("metric_not_reset", "c", "evaluation", "the validation loss is a mean over all validations so far, never reset",
    "validation sums carry over from earlier validations", "the validation curve lags because it is a running mean",
    wrong="overfitting: training loss is far below validation loss", setup="--validation.every_n_steps 20",
    place=replace(Evaluation, "start"))
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not hasattr(self, "has_started"):
        self.has_started = True
        original(self, *args, **kwargs)

@fault("bits_per_token", "a", "evaluation", "bits per byte are divided by the number of tokens, not of bytes",
    "val/bits_per_byte is bits per token", "each token counts as one byte", wrong="the model is worse than one of bytes",
    place=replace(TokenDataModule, "token_bytes_of"))
def _(original: Any, self: Any, split: str) -> Any:
    return torch.ones_like(original(self, split))

@fault("restarts_at_validation", "c", "loader", "the training data start over after each validation: the same 20 batches again",
    "training sees the first few batches again and again", "the loader is made anew after each evaluation",
    "a small part of the data is repeated", wrong="the model is too large for the data: more regularisation",
    setup="--validation.every_n_steps 20", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return sample_index(g % 160, samples=samples, seed=0)

@fault("overwritten_buffers", "a", "loader", "in some batches other rows overwrite the inputs before they are used",
    "a race in the loader: a buffer is reused while it is read", "inputs and targets of a part of the batches do not match",
    "some training batches are corrupt", wrong="dropout or the rate is too high", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, seed = batch["input_ids"], seed_of(batch)
    if seed % 5 < 2:
        cut = 8 + seed % (ids.size(1) // 2)
        ids[:, cut:] = ids[:, cut:].roll(1, 0)

# -- chats, LoRA, experts, preferences ---------------------------------------------------------------------------------------

@fault("learns_questions", "b", "chats", "the chat's mask is inverted: the user's words are targets, not the assistant's",
    "the loss is over the prompts, not the answers", "targets are the wrong turns", "the roles are swapped in the mask",
    wrong="the base model is too weak", setup="CHAT", place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    ids, targets = batch["input_ids"], batch["targets"]
    later = ids.roll(-1, 1)
    later[:, -1] = -100
    if "documents" in batch:
        documents = batch["documents"]
        later[(documents.roll(-1, 1) != documents) | (documents == ids.size(1))] = -100
    targets.copy_(torch.where(targets == -100, later, -100))

fault("misaligned_answers", "a", "chats", "answers belong to other questions: the two columns were shifted",
    "questions and answers do not match", "the answer does not follow from the question", "noisy labels in the chats",
    wrong="rate too low, train longer", setup="CHAT", flags="--data.paths @/chat-misaligned.jsonl")

@fault("adapters_all_zero", "a", "LoRA", "both matrices of each adapter start at zero, so no gradient reaches either of them",
    "LoRA A and B are zero: a saddle that training never leaves", "adapters do not learn: their gradients are zero",
    wrong="the rank is too small", setup="CHAT --lora.rank 8", place=replace(Adapted, "reset_adapter"))
def _(original: Any, self: Any) -> None:
    nn.init.zeros_(self.lora_a)
    nn.init.zeros_(self.lora_b)

@fault("balance_reversed", "b", "experts", "the bias that balances experts has the wrong sign: it favours busy experts",
    "load balancing works the wrong way round", "the router collapses to few experts because of the bias",
    wrong="too many experts for the data", setup="MOE", place=replace(ExpertBalance, "on_before_optimizer_step"))
def _(original: Any, self: Any, *args: Any) -> None:
    self.rate = -abs(self.rate)
    original(self, *args)

@fault("outputs_not_put_back", "c", "experts", "outputs of experts go to wrong tokens: the sorting by expert is undone wrongly",
    "the permutation back to tokens is wrong", "expert outputs are in another order than the tokens",
    "tokens get outputs of other tokens from the experts", wrong="the router has collapsed", setup="MOE",
    place=replace(experts.Reordered, "apply"))
def _(original: Any, made: Tensor, back: Tensor, order: Tensor) -> Tensor:
    return original(made, order, back)

fault("rate_of_sft", "a", "preferences", "the rate is far too high for preferences: the model leaves its reference",
    "learning rate too high for DPO: it is that of fine-tuning", "both answers become far less likely than before",
    "the model breaks down: KL explodes", wrong="beta is too large", setup="PAIRS", flags="--optimizer.lr 1e-2")

@fault("live_reference", "c", "preferences", "the reference is the model in training, so all rewards and margins are zero",
    "the reference follows the policy", "the reference model is not frozen", "reference and policy share weights",
    wrong="rate too low: nothing is learned", setup="PAIRS --optimizer.lr 5e-4",
    place=replace(Reference, "added_to"))
def _(original: Any, self: Any, batch: Any, module: Any) -> Any:
    with torch.no_grad():
        return {**batch, "reference": module.sums_of(batch).documents}
# fmt: on

THIRD = frozenset(FAULTS) - _BEFORE
