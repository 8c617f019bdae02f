"""The folder `callbacks` is the unit of reuse: a copy of it works under any name, and its files shadow nothing."""

import ast
import os
import shutil
import subprocess
import sys

import pytest
from private_names import ROOT

from lit_llm import callbacks

FOLDER = ROOT / "callbacks"
TRAIN = """
import importlib, json, sys, types
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

theirs = importlib.import_module(sys.argv[1])

class Module(LightningModule):
    micro_batch_tokens = 6
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 7)
        self.expert_counts, self.expert_biases = torch.tensor([[3, 1]]), [torch.zeros(2)]
    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.table(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))
    context_length, tokenizer = 6, types.SimpleNamespace(eos_id=0, encode=lambda text: [ord(c) % 7 for c in text])
    def forward(self, ids):
        return self.table(ids)
    def generate_text(self, prompt, **options):
        return prompt + " and so on"
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(24).view(8, 3).repeat(20, 1) % 7, batch_size=2)
    val_dataloader = train_dataloader

Path("quiz.jsonl").write_text('{"query": "a", "choices": ["b", "cd"], "gold": 0}')
made = {
    "TaskScores": lambda: theirs.TaskScores(["quiz.jsonl"], 4),
    "BatchRamp": lambda: theirs.BatchRamp([[0, 6], [18, 12]]), "ValidateEvery": lambda: theirs.ValidateEvery(4),
    "Profile": lambda: theirs.Profile(wait=2, steps=1), "TextSamples": lambda: theirs.TextSamples(["once"], 4),
    "StepCheckpoint": lambda: theirs.StepCheckpoint(4), "TrainingProgress": lambda: theirs.TrainingProgress(loss="train_loss"),
}
others = {"Constant", "Cosine", "Linear", "InverseSquareRoot", "Decay", "Schedule", "MetricsFile"}  # one schedule: WSD
names = [name for name in theirs.__all__ if isinstance(getattr(theirs, name), type) and name not in others]
trainer = Trainer(max_steps=8, log_every_n_steps=2, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=2,
                  enable_model_summary=False, default_root_dir=".",
                  logger=[TensorBoardLogger(".", name="", version=""), theirs.MetricsFile("metrics.jsonl")],
                  callbacks=[made.get(name, getattr(theirs, name))() for name in names])
trainer.fit(Module())
ours = [name for name in sys.modules if name.split(".")[0] in ("lit_llm", "callbacks") and name.split(".")[0] != sys.argv[1]]
assert ours == [], ours
assert Path(theirs.__file__).is_relative_to(Path.cwd()), theirs.__file__
logged = {name for line in open("metrics.jsonl") for name in json.loads(line)}
rows = sorted(name for name in trainer.callback_metrics if name != "train_loss" and name in logged)
print("METRICS", *rows)
"""


def test_it_imports_nothing_of_ours_except_by_relative_imports():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert {name.split(".")[0] for name in names}.isdisjoint({"lit_llm", "callbacks"}), f"{path}:{node.lineno}"


def test_no_file_has_the_name_of_a_module_of_the_standard_library():
    assert {path.stem for path in FOLDER.iterdir()} & sys.stdlib_module_names == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.b.c", "theirs"])
def test_a_copy_under_any_name_trains_with_every_callback(tmp_path, name):
    copy = tmp_path / name.replace(".", "/")
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    # With the folder itself on the path, too: the standard library must still be found.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(copy)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("METRICS")]
    expected = {
        "lr",
        "grad/norm",
        "spike/skipped",
        "throughput/tokens_per_second",
        "time/other_fraction",
        "val/loss",
        "task/quiz/acc",
        "experts/load",
    }
    assert expected <= set(line.split())
    assert "step 8/8  loss " in done.stdout  # of train_loss
    assert (tmp_path / "checkpoints/best.ckpt").exists() and list((tmp_path / "profile").glob("*.json.gz"))


def test_all_callbacks_are_exported():
    defined = {
        node.name
        for path in FOLDER.glob("[!_]*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "Protocol" not in map(ast.unparse, node.bases)
    }
    assert set(callbacks.__all__) - defined == {"ignore_signals"}
    assert defined - set(callbacks.__all__) == {
        "UserError",
        "Domain",
        "Stage",
        "LogLikelihoods",
        "Score",
        "Question",
        "LmEvalTasks",
        "MeanOfMicroBatches",
        *("Probe", "Readings", "UpdateSample", "CountedText", "RepeatedText", "ValidationOverlap"),
    }
