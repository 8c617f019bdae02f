"""docs/your-project.md, own-model.md and own-data.md: files and commands as written, and the results that the pages promise."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import torch
import yaml
from pages import ROOT, blocks, commands, files
from recipe_runs import curve
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.tokenizers import load_tokenizer

PAGES = [ROOT / f"docs/{name}.md" for name in ("your-project", "own-model", "own-data")]
FILES = {name: content for page in PAGES for name, content in files(page).items()}
COMMANDS = [command for page in PAGES for command in commands(page)]
TEXT = "".join(f"def line_{i}(Text): return 'repeats itself, {i * i} and {i % 7}'\n" for i in range(120))


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    for name, content in FILES.items():
        Path(name).write_text(content)
    Path("my.txt").write_text(TEXT)
    Path("stories.jsonl").write_text("".join(json.dumps({"text": f"Story {i}: {i * i} ends."}) + "\n" for i in range(60)))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def run_those_about(*words: str) -> int:
    """Run the pages' `lit_llm` commands that contain one of the words, in their order. Returns how many."""
    chosen = [c for c in COMMANDS if c.words[1:3] == ("-m", "lit_llm") and any(word in str(c) for word in words)]
    for command in chosen:
        assert main(list(command.words[3:])) == 0, command
    return len(chosen)


ALONE = ("copy",)
MODEL = ("--config own.yaml --architecture", "check --config own.yaml", "plan --config own.yaml", "--run runs/own")
DATA = ("questions", "stories")
PARTS = ("runs/lower", "runs/sign", "runs/halving", "runs/groups")
CHANGED = ("reglu.yaml",)


@pytest.mark.slow
def test_two_ranks_share_the_samples_of_a_loader_in_its_order_and_validate_each_once(project):
    Path("questions.py").write_text(Path("questions.py").read_text().replace("shuffle=True", "shuffle=False"))
    Path("seen.py").write_text(
        "import lightning as L\n"
        "class Seen(L.Callback):\n"
        "    def on_train_batch_start(self, trainer, module, batch, i):\n"
        "        with open(f'seen-{trainer.global_rank}.txt', 'a') as file:\n"
        "            file.writelines(str(row.tolist()) + '\\n' for row in batch['input_ids'])\n"
    )
    Path("seen.yaml").write_text("trainer: {callbacks+: [{class_path: seen.Seen}]}")
    words = ["--config", "questions.yaml", "--config", "seen.yaml", "--config", "strategy/ddp", "--trainer.devices", "2"]
    words += ["--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--run_dir", "runs/two", "--data.batch_size", "2"]
    words += ["--data.largest", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = fork_server.run([sys.executable, "-m", "lit_llm", "fit", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (Path(f"seen-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    # 2 ranks, 2 steps of 2 micro-batches of 2: the first 16 of 20 questions once, dealt out like cards.
    import questions

    data = questions.Questions(4, 2)
    dealt = [str(ids.tolist()) for batch in data.train_dataloader() for ids in batch["input_ids"]]
    assert len(set(dealt)) == 20 and (first, second) == (dealt[:16:2], dealt[1:16:2])
    # 5 held-out ones: Lightning's sampler gives rank 1 the first one again, in a batch of its own.
    assert len(data.val_dataloader().dataset) == 5
    assert curve(Path("runs/two"), "val/loss")[2] == pytest.approx(held_out_loss(Path("runs/two"), data), rel=1e-5)
    assert yaml.safe_load(Path("runs/two/config.yaml").read_text())["trainer"]["use_distributed_sampler"] is True


def held_out_loss(run: Path, data) -> float:
    """Of the last checkpoint: the mean over the answers of all held-out examples, by torch."""
    model = load_model(run / "checkpoints/last.ckpt")
    batch = {key: torch.cat([b[key] for b in data.val_dataloader()]) for key in ("input_ids", "targets")}
    assert ((batch["targets"] != -100).sum(1) == 2).all()
    with torch.no_grad():
        return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100).item()


def test_every_command_of_the_pages_is_run_below():
    ours = [c for c in COMMANDS if c.words[1:3] == ("-m", "lit_llm")]
    for command in ours:
        assert sum(any(word in str(command) for word in group) for group in (ALONE, MODEL, DATA, PARTS, CHANGED)) == 1, command
    assert [str(c) for c in COMMANDS if c not in ours] == ["python train.py", "python cli.py fit --config theirs.yaml"]


def rows(path: str, column: str) -> dict[int, float]:
    with open(path) as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row[column]}


@pytest.mark.slow
def test_callbacks_alone_under_a_trainer_and_under_another_command_line(project, monkeypatch):
    assert run_those_about(*ALONE) == 1
    # As the page says for the copies. lit_llm cannot be imported here.
    Path("train.py").write_text(Path("train.py").read_text().replace("from lit_llm.callbacks", "from callbacks"))
    script = "import runpy, sys; sys.modules['lit_llm'] = None; runpy.run_path('train.py')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", "theirs.yaml"])
    exec(compile(Path("cli.py").read_text(), "cli.py", "exec"), {"__name__": "__main__"})
    one, other = "logs/trainer/version_0/metrics.csv", "logs/cli/version_0/metrics.csv"
    for column in ("lr", "grad/norm", "grad/norm_clipped", "val/loss", "progress/tokens"):
        assert rows(one, column) == rows(other, column), column
    assert sorted(rows(one, "val/loss")) == [9, 19]  # after steps 10 and 20: self.log counts from 0
    rates = rows(one, "lr")
    assert [rates[t] for t in range(1, 16)] == pytest.approx([0.1 * min(1, t / 5) for t in range(1, 16)])
    assert rates[20] < rates[16] < 0.1
    assert min(rows(one, "grad/norm").values()) > 0.1 >= max(rows(one, "grad/norm_clipped").values()) - 1e-6
    # Fifteen steps by hand, warmed up and clipped, end in the weights of the last checkpoint before the decay.
    torch.manual_seed(1)
    table = torch.nn.Embedding(32, 32)
    batches = ((torch.arange(32)[:, None] + torch.arange(9)) % 32).split(4)  # 8 of (4, 9)
    for step in range(1, 16):
        ids = batches[(step - 1) % 8]
        table.zero_grad()
        cross_entropy(table(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(table.parameters(), 0.1)
        with torch.no_grad():
            table.weight.sub_(0.1 * min(1, step / 5) * table.weight.grad)
    for folder in ("saved", "saved-by-cli"):
        path = Path(folder, "stable.ckpt")
        saved = torch.load(path, weights_only=True)["state_dict"]["table.weight"]
        assert torch.allclose(saved, table.weight, atol=1e-6)


@pytest.mark.slow
def test_another_mlp_in_our_gpt(project):
    """The MLP of the page is computed in every block, and its matrices are trained."""
    assert run_those_about(*CHANGED) == 2
    before, model = (load_model(Path("runs/reglu/checkpoints/last.ckpt")) for _ in range(2))
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert [gate.shape for gate in gates] == [(96, 48)] * 2
    ids = torch.arange(32)[None]
    with torch.no_grad():
        for gate in gates:
            gate.neg_()  # relu(-gate) opens where relu(gate) is 0
        assert not torch.allclose(model(ids), before(ids), atol=1e-3)
    rate = yaml.safe_load(Path("reglu-rate.yaml").read_text())["optimizer"]["init_args"]["lr"]
    assert yaml.safe_load(Path("runs/reglu/config.yaml").read_text())["optimizer"]["init_args"]["lr"] == rate


@pytest.mark.slow
def test_the_custom_model(project, capsys):
    assert run_those_about(*MODEL) == 5
    saved = yaml.safe_load(Path("runs/own/config.yaml").read_text())["architecture"]
    assert saved == {"class_path": "mine.LSTMModel", "init_args": {"width": 48, "n_layer": 3}}
    weights = read(Path("runs/own/checkpoints/last.ckpt"))["state_dict"]
    assert weights["model.network.blocks.2.weight_hh_l0"].shape == (4 * 48, 48)
    out = capsys.readouterr().out
    assert "\ndef " in out and "mine.LSTMModel, context 32" in out


@pytest.mark.slow
def test_the_custom_data(project, capsys):
    assert run_those_about("questions") == 2
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("2 + 3 = ")
    # Only answers count in the loss: compute it by hand over the held-out examples, from the checkpoint.
    import questions

    loss = held_out_loss(Path("runs/questions"), questions.Questions())
    events = EventAccumulator("runs/questions").Reload()
    assert events.Scalars("val/loss")[-1].value == pytest.approx(loss, rel=1e-5)
    assert "val/bits_per_byte" not in events.Tags()["scalars"]  # no token_bytes
    # Stories: a stopped and continued run ends with the weights of an uninterrupted run.
    assert run_those_about("stories") == 3
    assert main(["fit", "--config", "stories.yaml", "--run_dir", "straight"]) == 0
    parts, straight = (read(Path(run, "checkpoints/last.ckpt")) for run in ("runs/stories", "straight"))
    assert parts["global_step"] == straight["global_step"] == 10
    for name, value in straight["state_dict"].items():
        assert torch.equal(value, parts["state_dict"][name]), name
    assert "val/bits_per_byte" in EventAccumulator("runs/stories").Reload().Tags()["scalars"]


WATCHER = """
from pathlib import Path
from lightning.pytorch import Callback

class Watcher(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open("seen.txt", "a") as file:
            file.write(f"{trainer.global_step} {batch['input_ids'].sum()}\\n")
"""


def test_a_custom_loader_restarts_after_a_resume(project, monkeypatch):
    """As the page's table says, and unlike a TokenDataModule. The step count continues."""
    Path("watcher.py").write_text(WATCHER)
    Path("questions.py").write_text(Path("questions.py").read_text().replace("shuffle=True", "shuffle=False"))
    Path("watched.yaml").write_text("trainer: {callbacks+: [{class_path: watcher.Watcher}]}")
    flags = ["fit", "--config", "questions.yaml", "--config", "watched.yaml"]
    assert main([*flags, "--trainer.max_steps", "4", "--schedule.total_steps", "6"]) == 0
    assert main([*flags, "--trainer.max_steps", "6", "--resume", "auto"]) == 0
    monkeypatch.delitem(sys.modules, "watcher")
    seen = [line.split() for line in Path("seen.txt").read_text().splitlines()]
    assert [int(step) for step, _ in seen] == [step for step in range(6) for _ in range(2)]  # two micro-batches each
    sums = [int(total) for _, total in seen]
    # Ten batches an epoch, eight consumed: the resumed epoch counts two more, which are the first two again.
    assert len(set(sums[:8])) > 4 and sums[8:] == [*sums[:2], *sums[:2]]


def test_the_language_model_under_a_plain_trainer(project, capsys):
    block = next(block for block in blocks((ROOT / "docs/your-project.md").read_text()) if "generate_text(" in block)
    names = {}
    exec(block, names)
    assert capsys.readouterr().out.splitlines()[-1] and names["module"].trainer.global_step == 20
    row = names["module"].trainer.callback_metrics
    assert row["train/loss"] < math.log(names["data"].vocab_size)  # it has learned


def test_custom_parts(project, capsys):
    assert run_those_about(*PARTS) == 4
    assert load_tokenizer("runs/lower").encode("ABC d").tolist() == list(b"abc d")
    assert load_tokenizer("runs/sign").encode("ABC d").tolist() == list(b"ABC d")
    assert read(Path("runs/sign/checkpoints/last.ckpt"))["optimizer_class"] == "parts.SignSGD"
    out = capsys.readouterr().out.splitlines()
    matrices = [f"model.network.blocks.{i}.weight_{kind}_l0" for i in (0, 1) for kind in ("ih", "hh")]
    assert f"matrix muon 0.01 0.1 {matrices}" in out
    assert "embedding adamw 0.01 0.1 ['model.network.embedding.weight', 'model.network.head.weight']" in out
    assert any(line.startswith("vector adamw 0.01 0.0 ['model.network.blocks.0.bias_ih_l0', ") for line in out)
    assert curve(Path("runs/halving"), "lr") == pytest.approx({1: 0.01 / 2, 10: 0.01 / 4})  # warmup to 0.01; halved at 4, 8
