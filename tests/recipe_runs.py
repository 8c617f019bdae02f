"""A tiny recipe on a small text, run through the command line in this process, and readers of what it leaves."""

import re
from pathlib import Path

import yaml
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.__main__ import main

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(400))

RECIPE = """
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 2}}
validation: {every_n_steps: 4}
checkpoint: {every_n_steps: 3}
trainer: {max_steps: 8, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 8}
"""


def curve(run: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return {e.step: e.value for e in events.Scalars(tag)}


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def table(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"((?:val|test)/\w+)\s*│\s*([\d.]+)", out)}


class Break(Callback):
    """Raises KeyError when the optimizer step `step` begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.step:
            raise KeyError("broken")


def breaking(step: int) -> list[str]:
    """Flags of an overlay that breaks the run in that step."""
    overlay = {"trainer": {"callbacks+": [{"class_path": "recipe_runs.Break", "init_args": {"step": step}}]}}
    Path("break.yaml").write_text(yaml.dump(overlay))
    return ["--config", "break.yaml"]
