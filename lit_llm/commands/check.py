"""`python -m lit_llm check`: the launch checklist of a recipe. The exit code is 0 if every check passes, else 1.

The command refuses a MeshStrategy that cannot split the model and the batch over the recipe's devices. Then it runs three
optimizer steps in a temporary folder on one device, with every callback of the recipe, and examines the result.
The batch is reduced to two micro-batches of two sequences, which is enough for the checks, unless `--full_batch true` is given.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from lit_llm.commands.launch import launch
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.number_domain import whole


def main(words: list[str]) -> int:
    """Run the command `check` with its arguments `words`; return the exit code: 0 if every check passes, else 1."""
    flags = OwnFlags("check")
    text = "Use the recipe's batch, not two micro-batches of two sequences."
    flags.add_argument("--full_batch", type=bool, help=text)
    flags.add_argument("--show", range=whole(1, 10**6), help="Print so many sequences of the run's first batch as text.")
    own, rest = flags.split(words)
    return launch("fit", rest, lambda arguments: _run(arguments, full_batch=own.full_batch, show=own.show), own=flags)


def _run(arguments: Arguments, *, full_batch: bool, show: int | None) -> int:
    from rich.console import Console
    from rich.table import Table

    from lit_llm.config.build import ONE_DEVICE, build
    from lit_llm.config.resolve import decide, read_spec
    from lit_llm.data import TokenDataModule
    from lit_llm.data.first_batch import batch_as_text, first_batch
    from lit_llm.plan.host_memory import memory_problem
    from lit_llm.plan.planned_recipe import build_to_plan
    from lit_llm.training.checklist import CheckedRun, checklist

    spec = read_spec("fit", arguments)
    strategy = spec.config.trainer.strategy
    if str(getattr(strategy, "class_path", "")).endswith(".MeshStrategy"):
        build_to_plan(arguments)  # the recipe's layout and batch, before both are cut
    with tempfile.TemporaryDirectory(prefix="lit_llm-check-") as folder:
        spec = spec.with_settings({"histograms": None})  # without a logger, it would warn
        spec = decide(spec, run_dir=Path(folder))
        built = build(spec, trainer={**ONE_DEVICE, "limit_val_batches": 1}, memory=memory_problem)
        ours = isinstance(built.datamodule, TokenDataModule)
        if show is not None and ours:
            print(*first_batch(built.datamodule, show), sep="\n")
        trained, say = built.spec.initial is not None, partial(print, flush=True)
        checked = CheckedRun(built.trainer, built.model, built.datamodule, built.spec.run_dir, trained=trained, say=say)
        batch = "the recipe's batch" if full_batch else checked.cut_batch()
        lines = checklist(checked)
        if show is not None and not ours:
            first = {name: each[:show] for name, each in checked.observer.batches[0].items()}
            print("first micro-batch of these steps", *batch_as_text(first, built.model.tokenizer), sep="\n")
        described = checked.run_lines()
    table = Table(title=f"launch checklist, {batch}", title_justify="left")
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row("[green]pass[/green]" if line.passed else "[red]FAIL[/red]", line.name, line.found)
    for sentence in described:
        print(sentence)
    Console(file=sys.stdout).print(table)
    return 0 if all(line.passed for line in lines) else 1
