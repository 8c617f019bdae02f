"""A disk that is full, read-only or deleted, from the first write of each kind of file on.

After every fault: no traceback; exit code 0 only if everything is there; otherwise one sentence, and nothing incomplete under a
final name. The same command then finishes on a good disk, with the same result as without the fault.
"""

from __future__ import annotations

import csv
import errno
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from ingest.chat_templates import unmarked, write_tokenizer
from safetensors.torch import save_file
from victim import Victim

from lit_llm.checkpoint import dcp_metadata, disk_format
from lit_llm.checkpoint.dcp_metadata import read_metadata
from lit_llm.hf.read import WeightFiles
from lit_llm.runs.metrics_rows import csv_values

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(60))
RECIPE = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, tokenizer: Bytes, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
validation: {every_n_steps: 2}
checkpoint: {every_n_steps: 2}
trainer: {max_steps: 3, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 1}
"""
FIT = ["fit", "--config=recipe.yaml", "--run_dir=runs/mine", "--data.tokenizer=BPE", "--data.tokenizer.vocab_size=280"]
COMMANDS = {
    **dict.fromkeys(("events", "metrics", "config", "tokenizer", "checkpoint", "lock", "cache", "plan"), FIT),
    "pack": [*FIT, "--data.packing=best_fit"],
    "export": ["export", "--run=runs/mine", "--out=out/hf"],
    "prepare": ["prepare", "--config=recipe.yaml", "--out=out/shards"],
    "mask": [
        "prepare",
        "--chat_template=chat.jinja",
        "--data.paths=chat.jsonl",
        "--data.tokenizer=TokenizerJSON",
        "--data.tokenizer.path=chatml",
        "--out=out/chats",
    ],
    "clean": ["clean", "--data.paths=text.txt", "--exact_duplicates=true", "--out=out/cleaned"],
}
GUARANTEES = Path(__file__).parents[2] / "docs/evidence/guarantees.md"
FAULTS = ("full", "read-only", "deleted")
OUTPUTS = {"export": "out/hf", "prepare": "out/shards", "mask": "out/chats", "clean": "out/cleaned"}
DIFFERS = re.compile(r"report\.json|metrics\.jsonl|manifest\.json|meta\.json|checkpoint\.pt|events\.|lock\.json|plan\.json")
"""Files with a time or a counter in them: only their names are compared."""


@pytest.fixture(scope="module")
def victim():
    victim = Victim()
    yield victim
    victim.close()


@pytest.fixture(scope="module")
def straight(victim):
    """What each command leaves behind on a good disk."""
    results: dict[str, dict[str, Any]] = {}

    def of(kind: str) -> dict[str, Any]:
        command = COMMANDS[kind]
        if (name := " ".join(command)) not in results:
            outcome = victim.run(case(kind, None))
            assert outcome["code"] == 0, outcome
            results[name] = outcome
        return results[name]

    return of


def case(kind: str, fault: str | None) -> dict[str, Any]:
    """What `victim.attack` takes."""
    command = COMMANDS[kind]
    again = [*command, "--resume=auto" if command[0] == "fit" else "--replace=true"]
    setup = [FIT] if command[0] == "export" else []
    files = {"recipe.yaml": RECIPE, "text.txt": TEXT, "out/notes": "", **(chat() if kind == "mask" else {})}
    return {"words": command, "then": again, "setup": setup, "files": files, "fault": None if fault is None else (fault, kind)}


@functools.cache
def chat() -> dict[str, str]:
    """Conversations, a template and a tokenizer for them."""
    turns = [[("user", f"What is {i} + 1?"), ("assistant", f"It is {i + 1}.")] for i in range(40)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer("chatml", Path(folder))
        tokenizer = json.dumps(json.loads((Path(folder) / "tokenizer.json").read_text()))  # ASCII
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return {"chat.jsonl": lines, "chat.jinja": unmarked("chatml"), "chatml/tokenizer.json": tokenizer}


def written(files: dict[str, str], kind: str) -> dict[str, str]:
    """Names and contents of the files that a command writes, without those that differ between any two runs."""
    output = OUTPUTS.get(kind, "runs/mine")
    mine = {name: content for name, content in files.items() if name == output or name.startswith(f"{output}/")}
    return {re.sub(r"tfevents.*", "tfevents", name): "" if DIFFERS.search(name) else content for name, content in mine.items()}


AGAIN = {
    "read-only": ("events", "metrics", "lock", "tokenizer", "plan", "pack"),
    "deleted": ("lock", "tokenizer", "pack"),
}
"""Files that a fault meets as it meets others: of `fit` the config, cache and checkpoints, for example."""


def mark(kind: str, fault: str) -> Any:
    if (kind, fault) == ("checkpoint", "full"):
        return ()
    return pytest.mark.soak if kind in AGAIN.get(fault, ()) else pytest.mark.slow


CELLS = [
    pytest.param(kind, fault, marks=mark(kind, fault))
    for kind in COMMANDS
    for fault in FAULTS
    if fault != "deleted" or kind not in ("plan", "metrics")  # once training runs, the next checkpoint makes the folder anew
]


def promised(kind: str, fault: str) -> str:
    """The cell of the table in guarantees.md. Empty if the table has no such kind of file."""
    rows = [line.strip("| ").split(" | ") for line in GUARANTEES.read_text().splitlines() if line.count(" | ") == 3]
    column = rows[0].index("folder deleted" if fault == "deleted" else fault)
    name = {"config": "config.yaml", "cache": "token cache"}.get(kind, kind)
    return next((row[column] for row in rows if re.search(rf"\b{name}\b", row[0])), "")


@pytest.mark.parametrize(("kind", "fault"), CELLS)
def test_a_fault_of_the_disk_costs_nothing_but_time(victim, straight, kind, fault):
    outcome, good = victim.run(case(kind, fault)), straight(kind)
    assert outcome is not None, "the process died"
    assert outcome["trace"] is None and "Traceback" not in outcome["err"] + outcome["out"], outcome["trace"] or outcome["err"]
    assert outcome["fault"], "the fault did not happen"
    if cell := promised(kind, fault):
        assert outcome["code"] in {"goes on": (0,), "goes on without that save": (0,), "goes on or ends": (0, 1, 2)}.get(
            cell, (1, 2)
        ), cell
    complete, now = written(good["files"], kind), written(outcome["files"], kind)
    if (kind, fault) == ("checkpoint", "deleted"):  # the save that it hit is lost, and later ones are there
        complete = {name: content for name, content in complete.items() if "step-00000002" not in name}
    if outcome["code"] == 0:
        assert complete.keys() <= now.keys()
        assert {name: content for name, content in now.items() if complete.get(name, content) != content} == {}
    else:
        assert outcome["code"] in (1, 2), outcome
        assert re.search(r"error: .*(No space|too large|Read-only|No such file|saved|written)", outcome["err"]), outcome["err"]
        left = [name for name in outcome["files"] if "partial" in name or name.endswith(".tmp")]
        if "Repeat the command to continue" in outcome["err"]:  # what is finished waits beside the output
            left = [name for name in left if not name.startswith("out/.")]
        assert not left, left
        if kind in OUTPUTS:  # all or nothing
            assert now in ({}, complete)
    assert outcome["then"]["code"] == 0, outcome["then"]
    assert losses(outcome["then"]["out"]) == losses(good["out"])
    assert {name: c for name, c in complete.items() if written(outcome["finally"], kind).get(name) != c} == {}


@pytest.mark.parametrize("kind", ["checkpoint", "pickle", "safetensors", "tensor", "dcp", "csv"])
def test_a_disk_that_cannot_be_read_is_not_called_damage(kind, tmp_path, monkeypatch):
    """Each reader of files from elsewhere lets the disk's error pass, with a name, to the one sentence in `__main__`."""
    broken = OSError(errno.EIO, os.strerror(errno.EIO))

    def fails(*_: Any, **__: Any) -> Any:
        raise broken

    weights, file = {"a.b": torch.ones(2)}, tmp_path / "file"
    if kind in ("safetensors", "tensor"):
        file = tmp_path / "model.safetensors"
        save_file(weights, file)
    elif kind == "pickle":
        file = tmp_path / "pytorch_model.bin"
        torch.save(weights, file)
    elif kind == "dcp":
        file = tmp_path / ".metadata"
        dcp.save(weights, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    elif kind == "csv":
        file.write_text("step,loss\n1,2\n")
    else:
        torch.save(weights | {"state_dict": {}}, file)
    read: Any = {"checkpoint": lambda: disk_format.read(file, verify=False), "csv": lambda: csv_values(file)}
    read |= {"dcp": lambda: read_metadata(tmp_path), "tensor": lambda: WeightFiles(tmp_path)["a.b"]}
    target: Any = {"dcp": (dcp_metadata._Reader, "load"), "csv": (csv, "DictReader")}
    target |= dict.fromkeys(("safetensors", "tensor"), (safetensors, "safe_open"))
    opened = mock.Mock(keys=lambda: ["a.b"], get_tensor=fails)
    monkeypatch.setattr(*target.get(kind, (torch, "load")), fails if kind != "tensor" else lambda *_, **__: opened)
    with pytest.raises(OSError) as error:
        read.get(kind, lambda: WeightFiles(tmp_path))()
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(file))


def losses(out: str) -> list[str]:
    """The values of the table that `fit` prints at its end."""
    return re.findall(r"val/\w+\s*│\s*([\d.]+)", out)
