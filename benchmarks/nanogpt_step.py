"""Processor time of an optimizer step beside a minimal one of nanoGPT's kind, on the same block, batch and optimizer.

"Theirs" is written here after nanoGPT's description: a fused projection for query, key and value, torch's attention, LayerNorm,
GELU, learned positions, a tied head, torch's cross-entropy, AdamW with and without decay, clipping at 1.0, a batch of random
slices of the token array. It logs nothing. Its AdamW is fused, which nanoGPT asks for on GPUs only; `--loop_adamw` takes the
loop over parameters that nanoGPT gets on a CPU.

"Plain" is our model, loss, clipping and optimizer in a loop without Lightning. "fit" is `Trainer.fit` of the recipe with every
default callback. They make their steps in turn, so that other load affects all; results are ratios of medians. Theirs has a
process of its own, so that neither uses memory that the other has freed. With `--recipe quickstart`, ours have that recipe's
block and optimizer.

    OMP_NUM_THREADS=1 python benchmarks/nanogpt_step.py [--size small|large] [--steps 60] [--runs 3] [--loop_adamw]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from lit_llm.callbacks.gradient_norm_and_clipping import scale_, total_norm
from lit_llm.config.build import Built, build
from lit_llm.config.objects import optimizer_of
from lit_llm.config.parse import parse
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import parameter_groups

SIZES = {  # layers, heads, width, block, sequences
    "small": (4, 4, 128, 64, 12),
    "large": (6, 6, 384, 256, 8),
}
WARMUP = 5  # steps before the clock starts


class TheirAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class TheirMLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up, self.gelu, self.down = (
            nn.Linear(width, 4 * width, bias=bias),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=bias),
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.gelu(self.up(x))))


class TheirBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, bias=bias), TheirAttention(width, heads, bias)
        self.norm2, self.mlp = nn.LayerNorm(width, bias=bias), TheirMLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TheirModel(nn.Module):
    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__()
        width, bias = config.n_embd, True  # whatever ours has
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(config.block_size, width)
        self.dropout = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(TheirBlock(width, config.n_head, bias) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.size(1))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def slices(tokens: Any, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random slices of the tokens as ids and targets, (batch, length) each."""
    starts = torch.randint(len(tokens) - length, (batch,)).tolist()
    rows = [torch.from_numpy(tokens[i : i + length + 1].astype("int64")) for i in starts]
    return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])


def random_tokens(config: GPTConfig) -> Any:
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (1_000_000,), dtype=torch.int32).numpy().astype("uint16")


def their_process(pipe: Any, config: GPTConfig, batch: int, fused: bool) -> None:
    """For each number that arrives, make a step of theirs with this factor of the rate, and send its processor time."""
    tokens, theirs = random_tokens(config), TheirModel(config, config.padded_vocab_size)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    rest = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)
    pipe.send(sum(p.numel() for p in theirs.parameters()))
    while (factor := pipe.recv()) is not None:
        began = time.process_time()
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * factor
        theirs(*slices(tokens, batch, config.block_size)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        pipe.send(time.process_time() - began)


class InTurn(Callback):
    """After each step of the Trainer, makes one of each other kind. Times all."""

    def __init__(self, built: Built, *, fused: bool) -> None:
        self.built, self.fused = built, fused
        self.times: dict[str, list[float]] = {"fit": [], "plain": [], "theirs": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        module, data = self.built.model, self.built.datamodule
        config: GPTConfig = module.config
        batch, tokens = data.micro_batch_size, random_tokens(config)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=their_process, args=(theirs, config, batch, self.fused), daemon=True).start()
        ours = GPT(config)
        optimizer = optimizer_of(self.built.config, parameter_groups(ours))
        self.others: dict[str, Callable[[float], float]] = {"plain": self.our_step, "theirs": self.their_step}
        self.ours = ours, optimizer, partial(slices, tokens, batch, config.block_size), module.loss_function({})
        counts = {self.pipe.recv(), sum(p.numel() for p in ours.parameters())}
        assert len(counts) == 1 or not config.bias, counts  # on their block
        self.began = time.process_time()

    def their_step(self, factor: float) -> float:
        self.pipe.send(factor)
        return self.pipe.recv()

    def our_step(self, factor: float) -> float:
        began = time.process_time()
        ours, optimizer, batch, loss = self.ours
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        ids, targets = batch()
        sums = ours(ids, targets, loss=loss)
        (sums.loss / targets.numel()).backward()
        gradients = [p.grad for p in ours.parameters() if p.grad is not None]
        scale_(gradients, torch.clamp(1.0 / (total_norm(gradients) + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.times["fit"].append(time.process_time() - self.began)
        names = list(self.others)
        for name in names if trainer.global_step % 2 else reversed(names):
            self.times[name].append(self.others[name](min(1.0, trainer.global_step / 100)))
        self.began = time.process_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.pipe.send(None)


def measure(size: str, steps: int, folder: Path, flags: list[str], *, recipe: str, fused: bool) -> dict[str, float]:
    """Median seconds of a step of each kind."""
    layers, heads, width, length, batch = SIZES[size]
    block = {
        "chars": ["--model.gelu_approximate", "none"],
        "quickstart": ["--data.tokenizer", "Characters", "--data.tokenizer.vocab_size", "128"],
    }
    built = build(parse("fit", [
        "--config", recipe, "--run_dir", str(folder / "run"), "--trainer.max_steps", str(steps),
        "--model.n_layer", str(layers), "--model.n_head", str(heads), "--model.n_embd", str(width),
        "--model.block_size", str(length), "--data.micro_batch_size", str(batch), "--data.global_batch_size", str(batch),
        "--trainer.limit_val_batches", "0", "--checkpoint.every_n_steps", "1000000", "--checkpoint.monitor", "null",
        "--schedule.warmup_steps", "2", "--samples", "null", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
        *block[recipe], *flags,
    ]))  # fmt: skip
    in_turn = InTurn(built, fused=fused)
    built.trainer.callbacks.append(in_turn)  # type: ignore[attr-defined]
    built.trainer.fit(built.model, datamodule=built.datamodule)
    return {name: statistics.median(times[WARMUP:]) for name, times in in_turn.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("chars", "quickstart"), default="chars", help="whose block and optimizer ours are")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loop_adamw", action="store_true")
    options, flags = parser.parse_known_args()
    found: list[dict[str, float]] = []
    for run in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(
                measure(options.size, options.steps, Path(folder), flags, recipe=options.recipe, fused=not options.loop_adamw)
            )
        text = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found[-1].items())
        print(f"run {run + 1}: {text}", flush=True)
    for name in ("plain", "fit"):
        ratios = [each[name] / each["theirs"] for each in found]
        print(f"{name} / theirs: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
