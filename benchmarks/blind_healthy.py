"""The healthy runs of the blind exam: short, and of many settings. A finding about one of them is a false alarm.

`blind_faults.py` runs them; there are also its kinds of models, the texts and what CHAT, PAIRS and MOE stand for.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple


class Healthy(NamedTuple):
    """A run and its flags beside those of its kind ("": all flags are here)."""

    name: str
    kind: str
    flags: str
    options: dict[str, Any]
    """Of `blind_faults.make`."""


RUNS: list[Healthy] = []


def run(name: str, kind: str, flags: str = "", steps: int = 80, **options: Any) -> None:
    RUNS.append(Healthy(f"ok-{name}-{kind}" if kind else f"ok-{name}", kind, flags, {"steps": steps, **options}))


for kind, seed in product("abc", (1, 2, 3)):
    run(f"seed-{seed}", kind, f"--seed_everything {seed} --data.seed {seed}", steps=120)

for kind, schedule in product("abc", ("Linear", "Constant", "WSD", "InverseSquareRoot")):
    run(f"schedule-{schedule.lower()}", kind, f"--schedule {schedule} --schedule.warmup_steps 15")
for kind, warmup in product("abc", (1, 40)):
    run(f"warmup-{warmup}", kind, f"--schedule.warmup_steps {warmup}")
for kind in "bc":
    run("decay-at-end", kind, "--schedule WSD --schedule.warmup_steps 10 --schedule.decay_steps 8 --schedule.final_ratio 0")
    run("half-rate", kind, "--optimizer.lr 1e-3")

OPTIMIZERS = {  # each with a rate that suits it
    "Adam": "1e-3", "NAdam": "1e-3", "RAdam": "2e-3", "Adamax": "4e-3", "Adagrad": "1e-2", "Adadelta": "1.0",
    "Adafactor": "1e-2", "RMSprop": "1e-3", "SGD": "0.3", "Lion": "5e-4", "MuonAdamW": "1e-2", "TorchMuon": "1e-2",
}  # fmt: skip
for name, rate in OPTIMIZERS.items():
    run(f"optimizer-{name.lower()}", "b", f"--optimizer {name} --optimizer.lr {rate}", steps=120)
for kind in "ac":
    run("optimizer-lion", kind, "--optimizer Lion --optimizer.lr 5e-4", steps=120)
    run("no-decay", kind, "--optimizer.weight_decay 0")
    run("more-decay", kind, "--optimizer.weight_decay 0.3")
run("momentum-sgd", "c", "--optimizer SGD --optimizer.lr 0.1 --optimizer.momentum 0.9", steps=120)
run("muon", "c", "--optimizer MuonAdamW --optimizer.lr 5e-3 --optimizer.adamw_lr 5e-3")

for kind, batch in product("abc", (1, 2, 32)):
    lower = "" if batch > 2 else "--optimizer.adamw_lr 3e-3 --optimizer.lr 3e-3" if kind == "a" else "--optimizer.lr 1e-3"
    run(f"batch-{batch}", kind, f"--data.global_batch_size {batch} {lower}", steps=40 if batch > 2 else 160)
for kind, micro in product("abc", (1, 4)):
    run(f"accumulate-{micro}", kind, f"--data.micro_batch_size {micro}", steps=50)
for kind, dropout in product("abc", (0.1, 0.3, 0.5)):
    run(f"dropout-{dropout}", kind, f"--model.dropout {dropout}", steps=100)
for kind in "abc":
    ramp = "--batch_ramp BatchRamp --batch_ramp.tokens_per_batch '[[0, 384], [7680, 768], [23040, 1536]]'"
    run("ramp", kind, f"{ramp} --data.micro_batch_size 4 --data.global_batch_size 16")
    run("resumed", kind, resumed=True)
    run("bf16-true", kind, "--trainer.precision bf16-true", steps=30)  # slow without units for it
    run("bf16-mixed", kind, "--trainer.precision bf16-mixed", steps=30)
    run("ema", kind, "--ema EMA --ema.decay 0.9")
    run("ranks", kind, "--data.micro_batch_size 4", steps=50, ranks=2)
for kind, width in product("ab", (32, 64, 192, 256)):
    run(f"width-{width}", kind, f"--model.n_embd {width}", steps=60 if width < 200 else 25)
for kind in "ab":
    run("width-512", kind, "--model.n_embd 512 --model.n_layer 1", steps=25)
for kind, depth in product("abc", (1, 8)):
    run(f"depth-{depth}", kind, f"--model.n_layer {depth} --model.n_embd 64", steps=60)
for every in (5, 20, 50, 100, 500):
    run(f"health-every-{every}", "abc"[every % 3], f"--health.every_n_steps {every}", steps=120)
for kind, tokenizer in product("bc", ("Bytes", "Characters", "BPE")):
    text = "--data TextFiles --data.train '@/train/*.txt' --data.val @/val.txt --data.global_batch_size 8"
    run(f"tokenizer-{tokenizer.lower()}", kind, f"{text} --data.tokenizer {tokenizer}")

# Tuning: chats with short and long answers, both packings, all weights and LoRA; pairs; plain text from a model's weights.
for kind, answers, packing in product("bc", ("chat", "long"), ("best_fit", "concatenate")):
    chat = f"CHAT --data.paths @/{answers}.jsonl --data.packing {packing} --model.block_size 96"
    run(f"sft-{answers}-{packing}", kind, chat)
    run(f"lora-{answers}-{packing}", kind, f"{chat} --lora.rank 8 --optimizer.lr 5e-3")
run("sft", "a", "CHAT")
run("lora", "a", "CHAT --lora.rank 4 --lora.dropout 0.1 --optimizer.lr 5e-3")
run("lora-attention", "b", "CHAT --lora.rank 4 --lora.targets '[query, value]' --optimizer.lr 5e-3")
for kind in "abc":
    run("dpo", kind, "PAIRS")
    lower = "--optimizer.lr 1e-3" + (" --optimizer.adamw_lr 1e-3" if kind == "a" else "")
    run("more-text", kind, f"--init_from @/base-KIND {lower}")
    new = f"TextFiles --data.train @/prose.txt --data.val @/prose-val.txt --data.global_batch_size 8 {lower}"
    json = "--data.tokenizer TokenizerJSON --data.tokenizer.path @/base-KIND/tokenizer.json"
    run("new-text", kind, f"--init_from @/base-KIND --data {new} {json}")
run("ipo", "b", "PAIRS --objective.loss ipo")
run("simpo", "b", "PAIRS --objective.loss simpo --objective.beta 2.0 --objective.gamma 0.5")
run("dpo-lora", "b", "PAIRS --lora.rank 8 --optimizer.lr 2e-3")

MODELS = {
    "experts": "MOE",
    "experts-softmax": "MOE --model.moe.router softmax",
    "one-expert": "MOE --model.moe.top_k 1",
    "shared-expert": "MOE --model.moe.shared_experts 1 --model.moe.first_dense 1",
    "sandwich": "--model.norm_position sandwich",
    "post-norm": "--model.norm_position post --model.qk_norm true",
    "parallel": "--model.parallel_residual true",
    "softcaps": "--model.attention_softcap 50 --model.logit_softcap 30",
    "window": "--model.window 32",
    "sinks": "--model.attention_sinks true",
    "partial-rotary": "--model.partial_rotary_factor 0.25",
    "tied": "--model.tie_embeddings true",
    "ahead": "--model.predict_ahead 1",
    "z-loss": "--loss.z_loss 1e-4",
    "chunks": "--loss.chunk_size 128",
    "geglu": "--model.mlp geglu",
    "long": "--model.block_size 256 --data.global_batch_size 4",
    "documents": "--model.mask_documents true",
    "whole-documents": "--data.packing best_fit",
    "one-head": "--model.n_head 1 --model.n_kv_head 1",
    "padded-vocabulary": "--model.pad_vocab_to 4096",
}
for name, flags in MODELS.items():
    run(name, "b", flags, steps=60)

# Every recipe with data and sizes of its own, shrunk by the overlay `debug`. The others tune: their like is above.
TUNING, OVERLAYS = {"finetune", "cpt", "sft", "lora", "dpo"}, {"debug", "decay", "profile"}
RECIPES = {path.stem for path in (Path(__file__).parent.parent / "recipes").glob("*.yaml")} - TUNING - OVERLAYS
CADENCE = "--trainer.max_steps 60 --trainer.log_every_n_steps 5 --health.every_n_steps 10 --validation.every_n_steps 20"
EXTRA = {"deepseek-v3": "--model.moe.first_dense 0"}  # of the two layers of `debug`
for recipe in sorted(RECIPES):
    flags = f"--config {recipe} --config debug {CADENCE} {EXTRA.get(recipe, '')}"
    run(f"recipe-{recipe}", "", f"{flags} --trainer.enable_progress_bar false --doctor null")
