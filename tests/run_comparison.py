"""Compares two runs bit for bit: every logged number, the samples of every rank in order, and the last checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lit_llm.checkpoint.disk_format import read
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.run_folder import CHECKPOINTS
from lit_llm.runs.setting_changes import SETTINGS

LEDGER = "samples-rank{}.jsonl"
"""The file that `sample_ledger.SampleLedger` writes in a run folder."""
STARTED, FINISHED = 0, -1
"""Written to the ledger in place of a step when a process starts, and when training ends."""

# Speed and resources differ between any two runs. The others are about a launch: what it has seen, and with what it began.
NOT_COMPARED = (
    *("throughput/", "time/", "memory/", "plan/", "rank/", "setup/"),
    *(
        "health/untouched_embeddings",
        "health/largest_id",
        "health/repeated_samples",
        "health/repeated_spans",
        "health/validation_overlap",
    ),
    *("health/unigram_loss", "health/bigram_loss", "health/validation_unigram_loss", "health/validation_bigram_loss"),
    *("health/commonest_target", "health/counted_pairs", "health/validation_length"),
    *("health/unknown_tokens", "health/unlearned_inputs", "health/validation_unseen"),
)
# The same in a checkpoint, and the files on disk: a signal saves one more.
NOT_COMPARED_STATE = re.compile(r"time|second|StepCheckpoint\.(kept|permanent|leaving)")
CAUSES = {
    "samples": "the order of samples or the position in it was not restored (data module, loader)",
    "train/loss": "weights, optimizer state or random draws were not restored",
    "lr": "the schedule depends on something besides the step, or trainer.max_steps differed",
    "grad/norm": "gradients differ: accumulation restarted inside a step, or random draws",
    "val/loss": "validation does not use a fixed set in a fixed order",
}


def ledger(run: Path, rank: int = 0) -> dict[int, list[int]]:
    """Checksums of a rank's samples, in order, by step. Of a step that was repeated after an interruption, the last ones."""
    steps: dict[int, list[int]] = {}
    previous = -1
    path = run / LEDGER.format(rank)
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            step, *checksums = json.loads(line)
        except ValueError:
            continue  # a line cut off by a kill
        if step != previous:
            steps[step] = []
        steps[step] += checksums
        previous = step
    return {step: checksums for step, checksums in steps.items() if step not in (STARTED, FINISHED)}


def curves(run: Path) -> dict[str, dict[int, float]]:
    """Every logged number by name and step, except those about time and about one launch."""
    scalars = LoadedRun(run, of_lit_llm=False).scalars.items()
    return {
        name: dict(zip(found.steps, found.values, strict=True)) for name, found in scalars if not name.startswith(NOT_COMPARED)
    }


def differences(straight: Path, interrupted: Path) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Compare an interrupted run with a straight one.

    Returns:
        (name, number of values, number of different values) of everything compared, and a sentence for the first difference of
        each name.
    """
    rows: list[tuple[str, int, int]] = []
    found: list[str] = []

    def compare(name: str, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        different = [key for key in sorted(a.keys() | b.keys()) if not same(a.get(key), b.get(key))]
        if a or b:
            rows.append((name, len(a.keys() | b.keys()), len(different)))
        if different:
            first = different[0]
            cause = next((text for known, text in CAUSES.items() if name.startswith(known)), "some state was not restored")
            found.append(f"{name} differs first at {first}: {short(a.get(first))} and {short(b.get(first))}. Likely: {cause}.")

    for rank in range(len(list(straight.glob(LEDGER.format("*"))))):
        compare(f"samples of rank {rank}, by step", ledger(straight, rank), ledger(interrupted, rank))
    a, b = curves(straight), curves(interrupted)
    for name in sorted(a.keys() | b.keys()):
        compare(name, a.get(name, {}), b.get(name, {}))
    last = [read(run / CHECKPOINTS / "last.ckpt") for run in (straight, interrupted)]
    for part in sorted((last[0].keys() | last[1].keys()) - {SETTINGS}):  # they are input, such as a callback that interrupts
        compare(f"checkpoint: {part}", *(dict(values(side.get(part), part)) for side in last))
    return rows, found


def values(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in nested dicts and lists that is compared, by its path."""
    if isinstance(tree, dict | list | tuple):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from values(item, f"{path}.{key}")
    elif not NOT_COMPARED_STATE.search(path):
        yield path, tree


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit. NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b and a is not None and b is not None)


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)
