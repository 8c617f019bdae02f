"""Repeatedly killed runs of other configurations than the matrix: optimizers, schedules, data, models, callbacks.

As in `matrix.py`, a run is killed and continued until it is complete, and must equal the uninterrupted one.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import NamedTuple

import matrix

from lit_llm.__main__ import main as lit_llm


class Configuration(NamedTuple):
    """A configuration, given as flags after the matrix's recipe. Duck type of `matrix.Cell`."""

    name: str
    added: str
    ranks: int = 1
    other: str = ""
    """Flags of the killed run only, which must not change the result."""
    layout: str = "ddp"
    """The strategy overlay on several ranks."""

    @property
    def straight(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def workers(self) -> str:
        return "killed"

    def flags(self) -> list[str]:
        overlay = (
            []
            if self.ranks == 1
            else ["--config", str(matrix.OVERLAYS / f"{self.layout}.yaml"), "--trainer.devices", str(self.ranks)]
        )
        micro = [] if "micro_batch_size" in self.added else ["--data.micro_batch_size", "2"]
        return [*overlay, *micro, *self.added.split()]

    def other_flags(self) -> list[str]:
        return self.other.split()


LORA = "--init_from base --lora.rank 3 --lora.dropout 0.2 --optimizer AdamW"
SHARDED = "--sharded_checkpoints true --async_checkpoints true --data.num_workers 2"
SHARDS = "--data TokenShards --data.path shards"
PACKED = "--data.packing best_fit --model.mask_documents true"
RAMP = "--batch_ramp.tokens_per_batch [[0,32],[300,64]]"
EXPERTS = (
    "--model.moe.experts 5 --model.moe.top_k 2 --model.moe.expert_width 24 --model.moe.balance 0.1 --model.moe.z_loss 0.01"
    " --model.mlp swiglu --expert_balance.rate 0.02 --compute.activation_checkpointing full"
)
STOPPING = """
trainer:
  callbacks:
  - {class_path: sample_ledger.SampleLedger}
  - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss, patience: 1, min_delta: 9.0}}
"""
CONFIGURATIONS = [
    Configuration("adamw cosine", "--optimizer AdamW --schedule Cosine --schedule.warmup_steps 3"),
    Configuration("lion linear", "--optimizer Lion --schedule Linear --schedule.warmup_steps 3", 1, "--async_checkpoints true"),
    Configuration("radam inverse root", "--optimizer RAdam --schedule InverseSquareRoot --schedule.warmup_steps 3"),
    Configuration("adafactor", "--optimizer Adafactor --optimizer.lr 0.01"),
    Configuration("shards", "--data TokenShards --data.train shards/train*.bin --data.val shards/val*.bin "
                  " --data.vocab_size 257"),
    Configuration("bpe", "--data.tokenizer BPE --data.tokenizer.vocab_size 280 --data.val_fraction 0.3 --model.block_size 8"),
    Configuration("grouped window", "--model.n_kv_head 1 --model.window 5 --model.logit_softcap 20 --model.mlp swiglu"),
    Configuration("chunked loss", "--loss.chunk_size 7 --loss.z_loss 0.001 --gradient_norm.clip 0.1"),
    Configuration("tokens ahead, packed", f"{SHARDS} {PACKED} --model.predict_ahead 2 --model.dropout 0.1"),
    Configuration("two stages, tokens ahead", "--model.predict_ahead 1 --ema.decay 0.9", 2, SHARDED, "pp"),
    Configuration("recomputation", "--compute.activation_checkpointing full --model.dropout 0.3"),
    Configuration("float16", "--trainer.precision 16-mixed --optimizer AdamW"),
    Configuration("epochs", "--trainer.max_steps -1 --trainer.max_epochs 2 --schedule Constant"),
    Configuration("cut epochs", "--data.micro_batch_size 1 --trainer.limit_train_batches 7 --validation null"
                  " --trainer.val_check_interval 9 --model.dropout 0.1", other="--data.num_workers 1"),
    Configuration("lora", LORA, other="--async_checkpoints true"),
    Configuration("lora on a base in bf16", f"{LORA} --trainer.precision bf16-true"),
    Configuration("two ranks, health", "--health.every_n_steps 1 --model.dropout 0.2", 2, "--async_checkpoints true"),
    Configuration("two shards, ema", "--optimizer AdamW --ema.decay 0.9 --ema.start_step 2", 2, SHARDED, "fsdp2"),
    Configuration("two stages, ema, tied", "--model.tie_embeddings true --ema.decay 0.9", 2, SHARDED, "pp"),
    Configuration("ema in bf16", "--trainer.precision bf16-true --ema EMA --ema.every_n_steps 2",
                  other="--async_checkpoints true"),
    Configuration("two stages, lora", LORA, 2, SHARDED, "pp"),
    Configuration("two shards, lora", f"{LORA} --compute.activation_checkpointing full", 2, SHARDED, "fsdp2"),
    Configuration("branch that decays", "--resume longer/checkpoints/step-00000010.ckpt --config decay --additional_steps 14"),
    Configuration("chats, packed", f"--data TokenShards --data.path chats {PACKED} --optimizer AdamW --schedule Cosine"
                  " --schedule.warmup_steps 2", other="--async_checkpoints true"),
    Configuration("preferences", f"--objective Preference --init_from longer --data TokenShards --data.path pairs {PACKED}"
                  " --model.block_size 96 --optimizer AdamW", other="--data.num_workers 1"),
    Configuration("two shards, distillation", f"--objective Distillation --objective.weight 0.7 {SHARDS} --loss.chunk_size 7"
                  " --optimizer AdamW", 2, SHARDED, "fsdp2"),
    Configuration("compressed lines", "--data.paths text.jsonl.gz --optimizer NAdam", other="--data.num_workers 2"),
    Configuration("gradient noise", "--gradient_noise.every_n_steps 2 --data.micro_batch_size 1 --trainer.log_every_n_steps 2"),
    Configuration("early stopping", "--config stopping.yaml"),
    Configuration("histograms, samples", "--histograms.every_n_steps 3 --samples TextSamples --samples.prompts ['7']"
                  " --samples.every_n_steps 2 --samples.max_new_tokens 4"),
    Configuration("spikes", "--spike_guard.sigma 0.5 --spike_guard.min_steps 4 --spike_guard.max_consecutive 50"),
    Configuration("normuon, four micro-batches", "--optimizer.normuon_beta2 0.95 --data.micro_batch_size 1"
                  " --model.input_convolution 4 --model.exclusive_attention true"),
    Configuration("own data", "--data lines.Lines --data.path text.txt", other="--data.num_workers 1"),
    Configuration("two halves, ema", "--optimizer AdamW --ema.decay 0.9 --model.dropout 0.2", 2, SHARDED, "tp"),
    Configuration("experts", EXPERTS, other="--async_checkpoints true"),
    Configuration("two shards, experts, ema", f"{EXPERTS} --optimizer.normuon_beta2 0.95 --data.micro_batch_size 1"
                  " --ema.decay 0.9 --ema.start_step 2", 2, SHARDED, "fsdp2"),
    Configuration("two ranks, shared experts", f"{EXPERTS} --model.moe.experts 6 --data.micro_batch_size 1", 2, SHARDED, "ep"),
    Configuration("two halves, shared experts", f"{EXPERTS} --model.moe.experts 6 --optimizer AdamW", 2, SHARDED, "ep-tp"),
    Configuration("two ranks, latents", "--model.latent.kv_rank 8 --model.latent.query_rank 12 --model.latent.nope_head_dim 6"
                  " --model.latent.rope_head_dim 4 --model.latent.value_head_dim 5 --model.qk_norm false --model.dropout 0.2",
                  2, SHARDED, "cp"),
    Configuration("two ranks, noise, ramp", f"{RAMP} --gradient_noise.every_n_steps 2 --data.micro_batch_size 1", 2),
]  # fmt: skip


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat(line: str) -> list[dict[str, str]]:
    """A line of the text as a question and an answer."""
    question, _, answer = line.partition(" is ")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prepare(folder: Path) -> None:
    """Write the recipe, the text, shards of the text, and a run whose weights LoRA freezes."""
    matrix.prepare(folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        assert lit_llm(["prepare", "--config", "recipe.yaml", "--out", "shards", "--replace", "true"]) == 0
        base = ["--run_dir", "base", "--trainer.max_steps", "1", "--schedule", "Constant", "--data.micro_batch_size", "2"]
        assert lit_llm(["fit", "--config", "recipe.yaml", "--replace", "true", *base]) == 0
        longer = ["--run_dir", "longer", "--data.micro_batch_size", "2", "--schedule", "Constant"]
        assert lit_llm(["fit", "--config", "recipe.yaml", "--replace", "true", *longer]) == 0
        lines = matrix.TEXT.splitlines()
        with gzip.open("text.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": line + "\n"}) + "\n" for line in lines)
        Path("chat.jsonl").write_text("".join(json.dumps({"messages": chat(line)}) + "\n" for line in lines * 2))
        Path("chat.jinja").write_text(TEMPLATE)
        Path("stopping.yaml").write_text(STOPPING)
        tokens = ["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "longer/tokenizer.json"]
        asked = [(question, answer) for question, _, answer in (line.partition(" is ") for line in lines)]
        pairs = ({"prompt": question, "chosen": answer[:9], "rejected": answer[9:18]} for question, answer in asked * 2)
        Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        chats = ["--chat_template", "chat.jinja", "--data.paths", "chat.jsonl", *tokens, "--out", "chats"]
        assert lit_llm(["prepare", *chats, "--replace", "true"]) == 0
        chats[chats.index("chat.jsonl")], chats[-1] = "pairs.jsonl", "pairs"
        assert lit_llm(["prepare", *chats, "--replace", "true"]) == 0
        assert lit_llm(["prepare", "--teacher", "longer", "--top_k", "5", *SHARDS.split()]) == 0
    finally:
        os.chdir(here)
