"""Time to compile the blocks of a recipe, the time that compilation saves a step, and after how many steps it pays.

Each run is a process: eager and compiled steps in turn, in processor time. The time to compile is that of the first two
compiled steps and the first compiled validation, with the compiler's processes, minus that of eager ones. "Cold" starts with
an empty cache of kernels, "warm" with that of the run before.

    OMP_NUM_THREADS=1 python benchmarks/compile_time.py [--recipe quickstart] [--steps 12] [--precision 32-true]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lit_llm.config.build import build
from lit_llm.config.objects import optimizer_of
from lit_llm.config.parse import parse
from lit_llm.distributed.block_kernels import compile_blocks
from lit_llm.models.gpt import GPT
from lit_llm.optim import parameter_groups


def seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Steps:
    """Training steps of a model, and a pass without gradients."""

    def __init__(self, recipe: str, precision: str, folder: Path, *, compiled: bool) -> None:
        self.built = build(parse("fit", ["--config", recipe, "--run_dir", str(folder), "--trainer.accelerator", "cpu"]))
        data = self.built.datamodule
        data.prepare_data()
        data.setup()
        config = self.built.model.config
        config.vocab_size = config.vocab_size or data.vocab_size
        torch.manual_seed(0)
        self.model = GPT(config)
        if compiled:
            compile_blocks(self.model, torch.device("cpu"))
        self.optimizer = optimizer_of(self.built.config, parameter_groups(self.model))
        self.batches = iter(data.train_dataloader())
        self.narrow = precision == "bf16-mixed"

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            sums = self.model(batch["input_ids"], batch["targets"], loss=self.built.model.loss_function(batch))
        return sums.loss / batch["targets"].numel()

    def train(self) -> float:
        """Seconds of a step."""
        batch, began = next(self.batches), seconds()
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds() - began

    def validate(self) -> float:
        """Seconds of a forward pass."""
        batch, began = next(self.batches), seconds()
        self.model.eval()
        with torch.no_grad():
            self.loss(batch)
        self.model.train()
        return seconds() - began


def one_process(recipe: str, precision: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        eager, compiled = (Steps(recipe, precision, Path(folder) / str(c), compiled=c) for c in (False, True))
        first = {steps.train: [steps.train(), steps.train(), steps.validate()] for steps in (eager, compiled)}
        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        for step in range(steps):
            for name, each in (("eager", eager), ("compiled", compiled))[:: 1 if step % 2 else -1]:
                times[name].append(each.train())
    before, after = (statistics.median(times[name]) for name in ("eager", "compiled"))
    to_compile = sum(first[compiled.train]) - sum(first[eager.train])
    print(json.dumps({"compile": to_compile, "eager": before, "compiled": after}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--precision", default="32-true", choices=("32-true", "bf16-mixed"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        one_process(options.recipe, options.precision, options.steps)
        return
    words = [sys.executable, __file__, *sys.argv[1:], "--alone"]
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            said = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(said.splitlines()[-1])
            saved = found["eager"] - found["compiled"]
            print(
                f"{options.recipe}, {options.precision}, {kind}: {found['compile']:.1f} s to compile; a step "
                f"{found['eager'] * 1e3:.0f} ms eager, {found['compiled'] * 1e3:.0f} ms compiled "
                f"({found['compiled'] / found['eager']:.3f}); pays after {found['compile'] / saved:,.0f} steps",
                flush=True,
            )


if __name__ == "__main__":
    main()
