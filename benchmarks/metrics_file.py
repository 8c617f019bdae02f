"""Processor time of a row of twelve values in metrics.jsonl, beside TensorBoard's.

The two alternate. The result is the median of eight pairs.

    python benchmarks/metrics_file.py
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lit_llm.callbacks import MetricsFile

# As the callbacks of a default run log them: one call each.
CALLS = (
    ("train/loss", "train/perplexity"),
    ("lr",),
    ("grad/norm", "grad/norm_clipped", "grad/clip_fraction"),
    ("progress/tokens", "memory/peak_gb", "throughput/tokens_per_second", "time/data_fraction"),
    ("spike/skipped",),
    ("plan/peak_gb",),
)
ROWS, PAIRS = 300, 8


def microseconds(logger: Logger, first: int) -> float:
    """Processor time of a row, of all threads."""
    began = time.process_time()
    for step in range(first, first + ROWS):
        for names in CALLS:
            logger.log_metrics({name: random.random() for name in names}, step)
    return (time.process_time() - began) / ROWS * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loggers = (MetricsFile(Path(folder) / "metrics.jsonl"), TensorBoardLogger(folder, name="", version=""))
        pairs = [[microseconds(logger, turn * ROWS) for logger in loggers] for turn in range(PAIRS + 1)][1:]
        for logger in loggers:
            logger.finalize("success")
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"metrics.jsonl {ours:.0f} µs a row, TensorBoard {theirs:.0f} µs, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
