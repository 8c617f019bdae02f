"""Processor time of an optimizer step of `Trainer.fit` with all default callbacks, over the time in a plain PyTorch loop.

Both use the same model, optimizer, batches, schedule, clipping, precision and logging interval (both write TensorBoard rows).
After each step of the Trainer, the same process makes the same step in the plain loop, so other load on the machine affects
both. The result is the ratio of the medians. Validation, checkpoints and samples are not timed.

    python benchmarks/loop_tax.py [--runs 3] [--steps 100] [--recipe recipes/quickstart.yaml] [flags of fit]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.tensorboard import SummaryWriter

from lit_llm.callbacks.learning_rate_schedules import wsd
from lit_llm.config.build import build
from lit_llm.config.objects import RunObjects, optimizer_of
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide
from lit_llm.data import TokenDataModule
from lit_llm.models.gpt import GPT
from lit_llm.optim import parameter_groups
from lit_llm.training.language_model import LanguageModel

WARMUP = 5  # steps before the clock starts


class ByHand(Callback):
    """Makes a step of the plain PyTorch loop after each step of the Trainer, and times both."""

    def __init__(self, cli: RunObjects, batches: Iterator[dict[str, torch.Tensor]], folder: Path) -> None:
        self.cli, self.batches, self.folder = cli, batches, folder
        self.trainer_times: list[float] = []
        self.hand_times: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        module: LanguageModel = self.cli.model
        torch.manual_seed(0)
        self.model = GPT(module.config)
        self.optimizer = optimizer_of(self.cli.config, parameter_groups(self.model))
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.writer = SummaryWriter(str(self.folder))
        self.step, self.logged_at = 0, time.perf_counter()
        self.resumed_at = time.process_time()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        now = time.process_time()
        self.trainer_times.append(now - self.resumed_at)
        self.one_step(trainer)
        self.resumed_at = time.process_time()
        self.hand_times.append(self.resumed_at - now)

    def one_step(self, trainer: Any) -> None:
        module: LanguageModel = self.cli.model
        self.step += 1
        batch = next(self.batches)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = wsd(self.step, peak=peak, final=0.0, warmup_steps=2, total_steps=trainer.max_steps, shape="cosine")
        with trainer.precision_plugin.forward_context():
            sums = self.model(batch["input_ids"], batch["targets"], loss=module.loss_function({}))
            loss = sums.loss / batch["targets"].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.step == 1 or self.step % trainer.log_every_n_steps == 0:
            now = time.perf_counter()
            self.writer.add_scalar("train/loss", loss.item(), self.step)
            self.writer.add_scalar("grad/norm", norm.item(), self.step)
            self.writer.add_scalar("lr", self.optimizer.param_groups[0]["lr"], self.step)
            tokens = batch["targets"].numel() * trainer.log_every_n_steps
            self.writer.add_scalar("tokens_per_second", tokens / (now - self.logged_at), self.step)
            self.logged_at = now


def paired(recipe: str, steps: int, folder: Path, flags: list[str]) -> tuple[float, float]:
    """Return (median processor seconds of a step with the Trainer, of a step of the plain loop)."""
    never = "1000000"
    cli = build(decide(parse("fit", [
        "--config", recipe, "--run_dir", str(folder / "run"),
        "--trainer.max_steps", str(steps), "--trainer.limit_val_batches", "0",
        "--checkpoint.every_n_steps", never, "--checkpoint.monitor", "null", "--samples.every_n_steps", never,
        "--schedule.warmup_steps", "2", *flags,
    ])))  # fmt: skip
    twin = build(decide(parse("fit", ["--config", recipe, "--run_dir", str(folder / "twin"), *flags]))).datamodule
    assert isinstance(twin, TokenDataModule)
    twin.prepare_data()
    twin.setup()
    by_hand = ByHand(cli, iter(twin.train_dataloader()), folder / "hand")
    cli.trainer.callbacks.append(by_hand)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return statistics.median(by_hand.trainer_times[WARMUP:]), statistics.median(by_hand.hand_times[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options, flags = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    ratios = []
    for run in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            trainer, hand = paired(options.recipe, options.steps, Path(folder), flags)
        ratios.append(trainer / hand)
        print(f"run {run + 1}: Trainer {trainer * 1e3:.1f} ms, hand {hand * 1e3:.1f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
