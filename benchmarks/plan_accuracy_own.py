"""Compare predictions of `plan` for custom models with measured training steps on a CPU: parameters, peak memory, FLOPs.

python benchmarks/plan_accuracy_own.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in ("tests", "tests/plan")]

from own_cases import CASES, settings, step_of
from training_step import predict


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| architecture | parameters | peak MB, predicted | measured | ratio | GFLOP, predicted | counted | ratio | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in CASES:
        run = settings(name, sequences=5, length=256)
        start = time.process_time()
        parameters, memory, flops = predict(run, cuda=False)
        seconds = time.process_time() - start
        step = step_of(run)
        assert step.parameters() == parameters, name
        peak, counted = step.peak_bytes(), step.flops()
        print(
            f"| {name} | {parameters:,} | {memory / 1e6:.1f} | {peak / 1e6:.1f} | {memory / peak:.4f} "
            f"| {flops / 1e9:.2f} | {counted / 1e9:.2f} | {flops / counted:.4f} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
