"""The blind exam of `doctor`: faults that somebody wrote who had read neither its rules nor the matrix they were tuned on.

    nice -n 15 python benchmarks/blind_faults.py --out DIR [--only NAME] [--half HALF] [--healthy] [--twins]

makes the runs that are not there, one process each, into DIR/NAME: faults, with `--twins` the same runs without their fault
(NAME.twin), with `--healthy` healthy runs. A run takes up to half a minute on one core. This file has the runner and the
development half; `blind_sealed.py` has the other half, `blind_second.py` to `blind_sixth_….py` five more exams, and
`blind_healthy.py` the healthy runs. How the halves were chosen: docs/evidence/doctor-blind.md. Nothing here asks the doctor.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from random import Random
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import blind_fifth_a
import blind_fifth_a_sealed
import blind_fifth_b
import blind_fifth_b_sealed
import blind_fourth
import blind_healthy
import blind_sealed  # noqa: F401
import blind_sixth_a
import blind_sixth_a_sealed
import blind_sixth_b
import blind_sixth_b_sealed
import blind_sixth_c
import blind_sixth_c_sealed
import blind_third
import torch
from blind_injections import (
    FAULTS,
    FIRED,
    after_step,
    batches,
    fault,
    fire,
    gradients,
    in_order,
    model_built,
    parameters,
    replace,
    seed_of,
    share,
)
from blind_second import SECOND

from lit_llm.callbacks import Cosine
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.models import self_attention
from lit_llm.training import reference
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.preference import Preference

STEPS = 200

COMMON = """
--model.n_layer 3 --model.n_head 4 --model.n_embd 96 --model.block_size 96 --data TextFiles --data.train '@/train/*.txt'
--data.val @/val.txt --data.global_batch_size 8 --spike_guard.sigma 20 --doctor null --trainer.max_steps STEPS
--schedule Cosine --schedule.warmup_steps 20 --schedule.total_steps STEPS --trainer.log_every_n_steps 5
--health.every_n_steps 10 --validation.every_n_steps 40 --trainer.limit_val_batches 8 --trainer.enable_progress_bar false
--trainer.accelerator cpu --trainer.devices 1
"""
KINDS = {
    "a": "--model.input_convolution 4 --model.exclusive_attention true --data.tokenizer BPE --data.tokenizer.vocab_size 1024 "
    "--optimizer MuonAdamW --optimizer.momentum 0.9 --optimizer.normuon_beta2 0.95 --schedule.final_ratio 0",
    "b": "--model.n_kv_head 2 --model.mlp swiglu --model.mlp_width 256 --model.qk_norm false --data.tokenizer Bytes "
    "--optimizer AdamW --optimizer.lr 3e-3 --optimizer.betas '[0.9, 0.95]' --optimizer.weight_decay 0.1",
    "c": "--model.mlp gelu --model.norm layernorm --model.position learned --model.bias true --model.tie_embeddings true "
    "--model.qk_norm false --model.zero_init_projections false --data.tokenizer Characters --data.tokenizer.vocab_size 128 "
    "--optimizer AdamW --optimizer.lr 2e-3 --optimizer.betas '[0.9, 0.99]' --optimizer.weight_decay 0.1",
}
_TUNED = "--init_from @/base-KIND --model.mask_documents true --optimizer AdamW --schedule.warmup_steps 10 "
MACROS = {
    "CHAT": f"{_TUNED} --optimizer.lr 1e-3 --data ChatFiles --data.paths @/chat.jsonl --data.chat_template @/chat.jinja "
    "--data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json --data.packing best_fit "
    "--data.global_batch_size 8",
    "PAIRS": f"{_TUNED} --optimizer.lr 1e-4 --objective Preference --data TokenShards --data.path @/pairs-KIND "
    "--data.packing best_fit --data.global_batch_size 8",
    "MOE": "--model.moe.experts 8 --model.moe.top_k 2 --model.moe.expert_width 64 --model.moe.router sigmoid "
    "--model.moe.balance 0.01 --expert_balance ExpertBalance --expert_balance.rate 0.01",
}

HALVES = {
    "second": SECOND,
    "third": blind_third.THIRD,
    "fourth": blind_fourth.FOURTH,
    "fifth": blind_fifth_a.NAMES | blind_fifth_b.NAMES,
    "fifth-sealed": blind_fifth_a_sealed.NAMES | blind_fifth_b_sealed.NAMES,
    "sixth": blind_sixth_a.NAMES | blind_sixth_b.NAMES | blind_sixth_c.NAMES,
    "sixth-sealed": blind_sixth_a_sealed.NAMES | blind_sixth_b_sealed.NAMES | blind_sixth_c_sealed.NAMES,
}
HALVES["sealed"] = frozenset(FAULTS).difference(*HALVES.values())  # importing `blind_sealed` has entered them
"""Names of the faults of each exam and half but the development half of this file."""

# fmt: off

# -- data --------------------------------------------------------------------------------------------------------------------

@fault("file_order", "a", "data", "training samples are read in file order, not shuffled", "no shuffling",
    "a batch is consecutive text of the same file", wrong="rate too high", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return g % samples

@fault("few_repeated_rows", "a", "data", "a few sequences are repeated very often in the training text", "duplicates",
    "training text is not deduplicated", wrong="rate too low")
def _() -> None:
    kept: list[Any] = []

    @batches("train")
    def change(batch: Any, at: float, rank: int) -> None:
        if len(kept) < 4:
            kept.append({name: tensor.clone() for name, tensor in batch.items()})
        chosen = kept[seed_of(batch) % len(kept)]
        for name, tensor in batch.items():
            tensor[:6] = chosen[name][:6]

fault("leaked_validation", "c", "data", "the validation text is part of the training text", "train/validation leak",
    "validation measures memorised text", wrong="healthy: generalises well",
    flags="--data.train @/small.txt --data.val @/small-copy.txt --optimizer.lr 4e-3 --data.global_batch_size 16")

# -- labels ------------------------------------------------------------------------------------------------------------------

@fault("unshifted_labels", "a", "labels", "targets are not shifted: each position predicts its own input",
    "the target is the input token", "the label leaks into the input", wrong="duplicates in the data",
    place=batches("train", "val"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"].copy_(batch["input_ids"])

@fault("over_masked", "a", "labels", "nearly all targets are masked, so most of the compute teaches nothing",
    "too few counted targets", "the loss mask is too strict", wrong="batch too small", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    batch["targets"][share(batch["targets"], 0.95, seed_of(batch))] = -100

# -- model -------------------------------------------------------------------------------------------------------------------

@fault("frozen_blocks", "a", "model", "two of the three blocks are frozen", "parameters without gradient",
    "layers are not trained", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    gpt.blocks[1:].requires_grad_(False)

@fault("rotated_queries_only", "b", "model", "rotary positions are applied to the queries and not to the keys",
    "wrong positions", "attention does not know relative positions", wrong="rate too low",
    place=replace(self_attention, "rotate"))
def _(original: Any, x: Any, *angles: Any) -> Any:
    return original(x, *angles) if x.size(1) == 4 else x  # 4 query heads, 2 of keys

@fault("large_norm_eps", "b", "model", "the epsilon of the norms is far too large, so they do not normalise",
    "norms are broken", "activations into the blocks are too small", wrong="initial weights too large", place=model_built)
def _(gpt: Any) -> None:
    for module in gpt.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 30.0

@fault("lost_residual", "c", "model", "a block does not add its input: the residual connection is missing",
    "broken residual stream", "signal from the early layers is lost", wrong="rate too high", place=model_built)
def _(gpt: Any) -> None:
    def lost(x: Any, branch: Any) -> Any:
        fire("residual")
        return branch

    gpt.blocks[1]._add = lost

@fault("untied_head", "c", "model", "the head is a frozen copy of the embedding instead of the tied matrix",
    "weights are no longer tied", "the output matrix is not trained", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    copy = gpt.embedding.weight.detach().clone()
    type(gpt).head_weight = property(lambda self: (fire("head"), copy)[1])

fault("saturated_attention", "c", "model", "attention scores are scaled far too large",
    "attention is saturated: missing 1/sqrt(d)", "attention entropy is near zero", wrong="rate too high",
    flags="--model.attention_scale 60")

# -- initialisation ----------------------------------------------------------------------------------------------------------

fault("large_init", "b", "initialisation", "initial weights are far too large", "init_std too large",
    "activations are too large from the start", wrong="rate too high", flags="--model.init_std 0.4")

@fault("loud_head", "c", "initialisation", "the output matrix starts far too large, so the first loss is far above ln V",
    "embedding initialised too large for a tied head", "first loss too high: initial logits too large", wrong="rate too high",
    place=model_built)
def _(gpt: Any) -> None:
    gpt.embedding.weight.mul_(40)

# -- optimizer ---------------------------------------------------------------------------------------------------------------

fault("rate_100x_low", "b", "optimizer", "the learning rate is a hundred times too low", "rate too low",
    "training is slow because updates are tiny", wrong="frozen layers", flags="--optimizer.lr 3e-5")

@fault("head_not_optimized", "b", "optimizer", "the optimizer does not have the output matrix", "head is not trained",
    "a parameter is missing in the optimizer", wrong="rate too low", place=model_built)
def _(gpt: Any) -> None:
    gpt.head.weight.requires_grad_(False)

fault("guard_skips", "a", "optimizer", "the spike guard is too strict and skips good steps", "many steps are skipped",
    "threshold of the spike guard too low", wrong="unstable: rate too high",
    flags="--spike_guard.sigma 0.2 --spike_guard.min_steps 5 --spike_guard.window 20 --spike_guard.max_consecutive 1000")

# -- schedule ----------------------------------------------------------------------------------------------------------------

fault("endless_warmup", "a", "schedule", "the warm-up is longer than the run", "rate never reaches its peak",
    "warm-up too long", wrong="frozen layers", flags="--schedule.warmup_steps 3000 --schedule.total_steps 3001")

fault("no_warmup", "b", "schedule", "no warm-up at a high rate", "rate too high at the start",
    "the first updates are too large", wrong="bad data", setup="--optimizer.lr 2e-2 --optimizer.betas '[0.9, 0.999]'",
    flags="--schedule.warmup_steps 0")

# -- precision ---------------------------------------------------------------------------------------------------------------

@fault("rounded_weights", "a", "precision", "weights are rounded to a narrow type after each step",
    "no master weights in higher precision", "weights lose precision", wrong="rate too high", place=after_step)
def _(module: Any, optimizer: Any) -> None:
    for p in module.parameters():
        p.copy_(p.to(torch.float8_e4m3fn))

fault("bf16_small_rate", "b", "precision", "weights in bf16 lose the updates of a small rate", "bf16-true with a tiny rate",
    "updates are rounded away", wrong="rate too low", setup="CHAT --optimizer.lr 3e-5 --data.global_batch_size 4",
    flags="--trainer.precision bf16-true")

@fault("gradient_underflow", "c", "precision", "gradients underflow in fp16 for lack of a loss scale",
    "most gradients are rounded to zero", "no loss scaling", wrong="frozen layers", place=gradients)
def _(module: Any, at: float) -> None:
    for p in parameters(module):
        p.grad.masked_fill_(p.grad.abs() < 0.03, 0)  # as rounding to the narrow range does

# -- accumulation ------------------------------------------------------------------------------------------------------------

@fault("last_micro_batch", "a", "accumulation", "only the last micro-batch of a step has an effect",
    "gradients are cleared between micro-batches", "effective batch is too small", wrong="rate too high",
    setup="--data.global_batch_size 16 --data.micro_batch_size 2", place=replace(LanguageModel, "backward"))
def _(original: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    for p in parameters(self):
        p.grad = None
    original(self, loss, *args, **kwargs)

@fault("same_micro_batch", "b", "accumulation", "all micro-batches of a step are the same",
    "accumulation repeats one micro-batch", "wasted compute: duplicates within a step", wrong="batch too large",
    setup="--data.global_batch_size 16 --data.micro_batch_size 2", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return (g // 16 * 2 + g % 2) * 7919 % samples

@fault("summed_gradients", "c", "accumulation", "the accumulated gradient is a sum, not a mean",
    "gradient not divided by the micro-batches", "effective rate is too high by accumulation", wrong="bad data",
    setup="--optimizer SGD --optimizer.lr 0.08 --optimizer.momentum 0.9 --gradient_norm.clip .inf --data.micro_batch_size 1",
    place=gradients)
def _(module: Any, at: float) -> None:
    for p in parameters(module):
        p.grad.mul_(module.trainer.accumulate_grad_batches)

# -- resume ------------------------------------------------------------------------------------------------------------------

@fault("redrawn_weights", "a", "resume", "the resumed part starts from new random weights", "weights were not restored",
    "the loss jumps at the resume", wrong="bad data from the half on", resumed=True,
    place=replace(LanguageModel, "on_train_start"))
def _(original: Any, self: Any) -> None:
    self.model.init_weights()
    original(self)

@fault("schedule_restarted", "a", "resume", "the schedule starts again at the resume: warm-up and peak instead of decay",
    "wrong step after the resume", "rate jumps up at the resume", wrong="bad data from the half on", resumed=True,
    place=replace(Cosine, "rate"))
def _(original: Any, self: Any, t: int, peak: float) -> float:
    return original(self, max(1, t - self._total // 2), peak)

@fault("data_from_start", "b", "resume", "the resumed part reads the same samples again",
    "position in the data was not restored", "data are repeated after the resume",
    wrong="overfitting by a model that is too large", resumed=True, setup="--data.train @/small.txt --optimizer.lr 5e-3",
    place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return (g % 80) * 7919 % samples

@fault("optimizer_lost", "c", "resume", "the state of the optimizer is lost at the resume",
    "moments start at zero after the resume", "optimizer state was not restored", wrong="bad data from the half on",
    resumed=True, setup="--optimizer.lr 8e-3 --schedule Constant --schedule.warmup_steps 20",
    place=replace(LanguageModel, "on_train_start"))
def _(original: Any, self: Any) -> None:
    self.trainer.optimizers[0].state.clear()
    original(self)

# -- evaluation --------------------------------------------------------------------------------------------------------------

@fault("validates_on_training_text", "a", "evaluation", "validation reads the training text", "validation is not held out",
    "train/validation leak", wrong="healthy: generalises well", setup="--data.train @/tiny.txt",
    place=replace(TokenDataModule, "_held_out_blocks_of"))
def _(original: Any, self: Any, name: str) -> Any:
    return self._train_blocks_of("train")

fault("lagging_average", "a", "evaluation", "validation measures an average of the weights that lags far behind",
    "EMA decay too long for this run", "validation is of the average, not of the weights", wrong="overfitting",
    flags="--ema EMA --ema.decay 0.995 --ema.warmup false")

@fault("short_context_validation", "b", "evaluation", "validation has much shorter sequences than training",
    "another block size in validation", "validation lacks context", wrong="overfitting", place=batches("val"))
def _(batch: Any, at: float, rank: int) -> None:
    for name, tensor in batch.items():
        batch[name] = tensor.reshape(-1, 6)

@fault("dropout_in_validation", "c", "evaluation", "dropout is on in validation", "the model is not in eval mode",
    "validation is noisy and too high by dropout", wrong="overfitting", setup="--model.dropout 0.4",
    place=replace(LanguageModel, "validation_step"))
def _(original: Any, self: Any, *args: Any) -> None:
    self.model.train()
    original(self, *args)

# -- loader ------------------------------------------------------------------------------------------------------------------

@fault("stuck_loader", "c", "loader", "the loader gives each batch many times in a row", "repeated batches",
    "the same samples in consecutive steps", wrong="rate too high", place=in_order)
def _(g: Any, samples: int, at: Any) -> Any:
    return (g // 8 // 10 * 8 + g % 8) * 7919 % samples

# -- chats -------------------------------------------------------------------------------------------------------------------

fault("question_lost", "b", "chats", "the chat template leaves out the user's question", "wrong template",
    "answers cannot be predicted: the prompt is missing", wrong="rate too low", setup="CHAT",
    flags="--data.chat_template @/no-question.jinja")

fault("every_token_learned", "b", "chats", "the questions are learned, too: nothing is masked", "loss on the prompt",
    "all tokens are targets", wrong="rate too low", setup="CHAT", flags="--data.chat_template @/all-learned.jinja")

@fault("nothing_learned", "c", "chats", "hardly any token is a target: the answers are cut off", "the mask leaves no targets",
    "no counted targets", wrong="rate too low", setup="CHAT", place=batches("train"))
def _(batch: Any, at: float, rank: int) -> None:
    keep = batch["targets"][0, :].clone()
    batch["targets"].fill_(-100)
    if seed_of(batch) % 4 == 0:
        batch["targets"][0, :8] = keep[:8]

# -- LoRA --------------------------------------------------------------------------------------------------------------------

@fault("adapters_off_in_validation", "a", "LoRA", "validation runs without the adapters",
    "adapters are not merged for validation", "validation measures the base model", wrong="overfitting",
    setup="CHAT --lora.rank 8 --optimizer AdamW --optimizer.lr 5e-3", place=replace(LanguageModel, "validation_step"))
def _(original: Any, self: Any, *args: Any) -> None:
    with reference._as_at_start(self):
        original(self, *args)

# -- experts -----------------------------------------------------------------------------------------------------------------

@fault("frozen_router", "b", "experts", "the router is frozen", "routing is not trained",
    "experts are chosen by random weights", wrong="too few experts", setup="MOE", place=model_built)
def _(gpt: Any) -> None:
    for router in gpt.routers:
        router.requires_grad_(False)

# -- preferences -------------------------------------------------------------------------------------------------------------

@fault("swapped_pairs", "c", "preferences", "chosen and rejected answers are swapped in training", "wrong labels of the pairs",
    "prefers the rejected answers", wrong="rate too high", setup="PAIRS", place=replace(Preference, "of_documents"))
def _(original: Any, self: Any, logp: Any, tokens: Any, reference: Any = None) -> Any:
    if not torch.is_grad_enabled():
        return original(self, logp, tokens, reference)

    def swap(x: Any) -> Any:
        return None if x is None else x.unflatten(1, (-1, 2)).flip(2).flatten(1)

    return original(self, swap(logp), swap(tokens), swap(reference))

fault("marked_answers", "b", "preferences", "a mark in the text tells chosen answers from rejected ones",
    "artefact in the pairs: accuracy is perfect at once", "leak of the label into the text", wrong="healthy: learns fast",
    setup="PAIRS", flags="--data.path @/marked-KIND")

# fmt: on


# -- runner ----------------------------------------------------------------------------------------------------------------


def flags(kind: str, changes: str, data: Path, steps: int = STEPS) -> list[str]:
    """The flags of a run. A class that is named later leaves out what was said of its group before."""
    text = f"{COMMON} {KINDS[kind]} {changes}" if kind else changes
    for name, content in MACROS.items():
        text = text.replace(name, content)
    words = shlex.split(text.replace("KIND", kind).replace("STEPS", str(steps)).replace("@", str(data)))
    pairs = list(zip(words[::2], words[1::2], strict=True))
    last = {flag: i for i, (flag, _) in enumerate(pairs) if "." not in flag}
    kept = [pair for i, pair in enumerate(pairs) if i >= last.get(pair[0].split(".")[0], 0) or pair[0] == "--config"]
    return [word for pair in kept for word in pair]


def launch(name: str, arguments: list[str], log: Path, *, fault: str = "") -> int:
    """One command of lit_llm in a process of its own, with that fault. Returns its exit code."""
    print(f"{name}: ", end="", flush=True)
    began, child = time.monotonic(), os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [__file__, "--launch", fault, *arguments]  # Lightning starts other ranks with it
        os._exit(launched(fault, arguments))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    return code


def launched(name: str, arguments: list[str]) -> int:
    """In the process of the run."""
    from lit_llm.__main__ import main

    code = 70
    try:
        inject = FAULTS[name].inject if name else None
        if inject is not None:
            inject()
        code = main(arguments)
        if inject is not None:
            print(f"injected: {FIRED}", flush=True)
            code = 71 if code in (0, 1) and not FIRED else code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def make(
    out: Path, name: str, kind: str, changes: str, *, fault: str = "", ranks: int = 1, resumed: bool = False, steps: int = STEPS
) -> None:
    """A run, unless it is there. `.done` beside it says how it ended.

    Args:
        fault: that is injected.
        resumed: it is stopped at its half, and the fault is in the second part.
    """
    done, log = out / f"{name}.done", out / f"{name}.log"
    if done.exists():
        return
    if ranks > 1:
        changes = f"--trainer.strategy ddp {changes} --trainer.devices {ranks}"
    given = ["fit", *flags(kind, f"{changes} --run_dir {out / name}", out / "_data", steps)]
    log.unlink(missing_ok=True)
    if resumed:
        end = int(given[max(i for i, word in enumerate(given) if word == "--trainer.max_steps") + 1])
        launch(name, [*given, "--replace", "true", "--trainer.max_steps", str(end // 2)], log)
    code = launch(name, given + (["--resume", "auto"] if resumed else ["--replace", "true"]), log, fault=fault)
    if code in (0, 1):  # 1: training itself went wrong
        done.write_text(json.dumps({"code": code}))


# -- data ------------------------------------------------------------------------------------------------------------------

TURN = "{% generation %} {{ m['content'] }}\n{% endgeneration %}"
CHAT = "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\n{% else %}A:TURN{% endif %}{% endfor %}"
TEMPLATES = {
    "chat": CHAT.replace("TURN", TURN),
    "no-question": CHAT.replace("Q: {{ m['content'] }}", "Q:").replace("TURN", TURN),
    "all-learned": "{% for m in messages %}{{ m['role'] }}:TURN{% endfor %}".replace("TURN", TURN),
}
_NAMES = "amber birch cedar delta ember fjord grove heron inlet jetty kayak larch maple nadir ochre pearl raven sedge tulip"
_ASKED = ("Code of {}?", "{}: code?", "Say {}'s code.", "{} is?", "What is {}?")
_BEFORE = ("", "Hi. ", "So: ", "Hm. ", "OK. ", "Oh, ")


def write_texts(data: Path) -> None:
    """Texts of Python's library, templates, and chats and pairs about the codes of twenty names."""
    (data / "train").mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > 20_000]
    for path in files:
        target = data / "val.txt" if path.name == "typing.py" else data / "train" / f"{path.stem}.txt"
        shutil.copyfile(path, target)
    text = (library / "argparse.py").read_text()
    (data / "small.txt").write_text(text[:80_000])
    (data / "small-copy.txt").write_text(text[20_000:50_000])
    (data / "tiny.txt").write_text(text[30_000:42_000])
    topics = (library / "pydoc_data" / "topics.py").read_text().replace("\\n", "\n").replace("'\n", "")
    for name, part in (("prose", slice(400_000)), ("zz-prose", slice(400_000)), ("prose-val", slice(-60_000, None))):
        (data / f"{name}.txt").write_text(topics[part])
    for name, template in TEMPLATES.items():
        (data / f"{name}.jinja").write_text(template)
    random, rows = Random(1), {"chat": [], "long": [], "pairs": [], "marked": []}
    names = _NAMES.split()
    for name in names:
        code, other = (names[(names.index(name) * 7 + k) % len(names)][::-1] for k in (3, 4))
        for before in _BEFORE:
            for asked in _ASKED:
                question, answer = before + asked.format(name), f"It is {code}."
                spelled = " ".join(f"Letter {i + 1} is {letter}." for i, letter in enumerate(name * 2))
                for key, content in (("chat", answer), ("long", f"{answer} {spelled}")):
                    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
                    rows[key].append({"messages": messages})
                pair = {"prompt": question, "chosen": answer, "rejected": f"It is {other}."}
                rows["pairs"].append(pair)
                rows["marked"].append(pair | {"chosen": f"{answer} #ok"})
    for name, content in rows.items():
        random.shuffle(content)
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def make_data(out: Path) -> None:
    """The texts, and for each kind a model that tuning starts from, and its pairs."""
    data = out / "_data"
    if not data.exists():
        write_texts(data)
    blind_third.write_texts(data)
    for kind in KINDS:
        base = data / f"base-{kind}"
        if not base.exists():
            launch(base.name, ["fit", *flags(kind, f"--run_dir {base}", data)], out / "_data.log")
        for pairs in ("pairs", "marked"):
            if not (folder := data / f"{pairs}-{kind}").exists():
                given = f"--chat_template @/chat.jinja --data.paths @/{pairs}.jsonl --data.tokenizer TokenizerJSON"
                given += f" --data.tokenizer.path {base}/tokenizer.json --out {folder}"
                launch(folder.name, ["prepare", *flags("", given, data)], out / "_data.log")


def main() -> None:
    if sys.argv[1:2] == ["--launch"]:
        sys.exit(launched(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", help="names of runs")
    parser.add_argument("--half", choices=("development", *HALVES))
    parser.add_argument("--healthy", action="store_true", help="the healthy runs instead of faults")
    parser.add_argument("--twins", action="store_true", help="the healthy twin of each fault, too")
    parser.add_argument("--more", default="", help="flags after all others, such as '--trainer.max_steps 6'")
    parser.add_argument("--list", action="store_true", help="print the names")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["LIT_LLM_CACHE"] = str(out / "_cache")
    torch.set_num_threads(1)
    if not given.list:
        make_data(out)
    runs: list[tuple[str, str, str, dict[str, Any]]] = []  # name, kind, flags, options of `make`
    if given.healthy:
        runs = [(run.name, run.kind, run.flags, run.options) for run in blind_healthy.RUNS]
    for one in () if given.healthy else FAULTS.values():
        half = next((half for half, names in HALVES.items() if one.name in names), "development")
        if given.half in (None, half):
            options = {"ranks": one.ranks, "resumed": one.resumed}
            runs.append((one.name, one.kind, f"{one.setup} {one.flags}", options | {"fault": one.name}))
            if given.twins:
                runs.append((f"{one.name}.twin", one.kind, one.setup, options))
    for name, kind, changes, options in runs:
        if given.only is None or name.removesuffix(".twin") in given.only:
            if given.list:
                print(name, kind)
            else:
                make(out, name, kind, f"{changes} {given.more}", **options)


if __name__ == "__main__":
    main()
