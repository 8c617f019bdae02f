"""What `Trainer.fit` with every shipped callback costs over a hand-written PyTorch loop: time per optimizer step, as a ratio.

Same model, optimizer, batches, schedule, clipping, precision and logging interval (both write TensorBoard rows). Pairs
alternate in one process, so a slow machine slows both; the median of the pairs' ratios is what counts. Validation,
checkpoints and samples do not fall into the timed steps: they are work of their own, not a tax on a step.

    python benchmarks/loop_tax.py [--pairs 7] [--steps 40] [--recipe recipes/quickstart.yaml]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.tensorboard import SummaryWriter

from callbacks.schedule import cosine
from lit_llm.cli import RecipeCLI
from lit_llm.model import GPT
from lit_llm.module import LanguageModel
from lit_llm.optimizers import parameter_groups

WARMUP = 5  # steps before the clock starts


class Clock(Callback):
    """Wall time of the steps after the warm-up, from the end of one step to the end of the last."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == WARMUP:
            self.start = time.perf_counter()
        self.stop = time.perf_counter()


def through_trainer(recipe: str, steps: int, folder: Path) -> tuple[float, RecipeCLI]:
    never = "1000000"
    cli = RecipeCLI("fit", [
        "--config", recipe, "--run_dir", str(folder), "--trainer.max_steps", str(steps), "--trainer.limit_val_batches", "0",
        "--checkpoint.every_n_steps", never, "--samples.every_n_steps", never,
        "--schedule.warmup_steps", "2", "--checkpoint.monitor", "null",
    ])  # fmt: skip
    clock = Clock()
    cli.trainer.callbacks.append(clock)
    # The bar prints and the last checkpoint is written after the clock has stopped.
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return (clock.stop - clock.start) / (steps - WARMUP), cli


def by_hand(cli: RecipeCLI, steps: int, folder: Path) -> float:
    module: LanguageModel = cli.model
    torch.manual_seed(0)
    model = GPT(module.config)
    optimizer = cli._optimizer_factory(parameter_groups(model))
    peaks = [group["lr"] for group in optimizer.param_groups]
    writer = SummaryWriter(str(folder))
    interval = cli.trainer.log_every_n_steps
    cli.datamodule.trainer = None  # the order then starts from the beginning and never ends
    batches = iter(cli.datamodule.train_dataloader())
    start = last = time.perf_counter()
    for step in range(1, steps + 1):
        batch = next(batches)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = cosine(step, peak=peak, final=0.1 * peak, warmup_steps=2, total_steps=steps)
        with cli.trainer.precision_plugin.forward_context():
            sums = model(batch["input_ids"], batch["targets"], loss=module.loss_function)
            loss = sums.loss / batch["targets"].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % interval == 0:
            now = time.perf_counter()
            writer.add_scalar("train/loss", loss.item(), step)
            writer.add_scalar("grad/norm", norm.item(), step)
            writer.add_scalar("lr", optimizer.param_groups[0]["lr"], step)
            writer.add_scalar("tokens_per_second", batch["targets"].numel() * interval / (now - last), step)
            last = now
        if step == WARMUP:
            start = time.perf_counter()
    elapsed = time.perf_counter() - start
    writer.close()
    return elapsed / (steps - WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios = []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            trainer, cli = through_trainer(options.recipe, options.steps, Path(folder) / "run")
            hand = by_hand(cli, options.steps, Path(folder) / "hand")
        ratios.append(trainer / hand)
        print(f"pair {pair + 1}: Trainer {trainer * 1e3:.1f} ms, hand {hand * 1e3:.1f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
