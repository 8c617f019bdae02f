"""`lit_llm` from Python: README's lines run, and they train and write text as the commands do."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import TEXT, run

import lit_llm
from lit_llm.core.errors import UserError

README = Path(__file__).parents[2] / "README.md"


def losses(run_dir):
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def test_the_import_takes_no_torch():
    code = "import sys, lit_llm; assert not {'torch', 'lightning', 'jsonargparse'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readmes_lines_train_and_write_as_the_commands_do(folder, capsys):
    block = README.read_text().partition("## From Python")[2].partition("\n#")[0]
    lines = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    changed = lines.replace('"quickstart"', '"tiny.yaml"').replace("runs/python", "runs/mine")
    assert changed.count("tiny.yaml") == 1
    names: dict[str, Any] = {}
    exec(changed, names)
    printed = capsys.readouterr().out
    assert run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/command", "--trainer.max_steps", "20")[0] == 0
    assert losses("runs/mine") == losses("runs/command") != []
    model = names["model"]
    code, out, _ = run(
        capsys, "generate", "--run", "runs/command", "--prompt", "def ", "--max_new_tokens", "40", "--temperature", "0.7"
    )
    assert code == 0 and out.rstrip("\n") in printed
    ids = torch.tensor(model.tokenizer.encode(TEXT[:15]))[None]  # (1, 15)
    trained = names["recipe"].model.eval()  # as training left it, not read from the checkpoint
    with torch.no_grad():
        assert torch.equal(model(ids), trained(ids.long()))
    assert not model.training


def test_a_mistyped_key_and_a_missing_run_are_sentences(folder):
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        lit_llm.load_recipe("tiny.yaml", settings={"trainer.max_step": 4})
    with pytest.raises(UserError, match="no run folder"):
        lit_llm.TrainedModel("runs/none")


OWN = """
import lightning, torch

class Numbers(lightning.LightningDataModule):
    vocab_size = 32

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(8) + i, "targets": torch.arange(8) + i + 1} for i in range(16)]
        return torch.utils.data.DataLoader(rows, batch_size=4)

    val_dataloader = train_dataloader
"""


def test_a_run_without_a_tokenizer_gives_logits_and_says_that_prompts_need_one(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "numbers_of_mine.py").write_text(OWN)
    (folder / "own.yaml").write_text(
        "model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}\ndata: {class_path: numbers_of_mine.Numbers}\n"
        "schedule: {class_path: Constant}\ntrainer: {max_steps: 2, accelerator: cpu}\n"
    )
    assert run(capsys, "fit", "--config", "own.yaml", "--run_dir", "runs/my")[0] == 0
    model = lit_llm.TrainedModel("runs/my", device="cpu")
    assert model.tokenizer is None and model(torch.arange(8)[None]).shape == (1, 8, 32)
    with pytest.raises(UserError, match="the run runs/my has no tokenizer: give your data module the attribute `tokenizer`"):
        model.generate("1 2")
    code, _, err = run(capsys, "generate", "--run", "runs/my", "--prompt", "1 2")
    assert code == 2 and err.startswith("error: the run runs/my has no tokenizer: give your data module the attribute")


def test_sampling_is_given_as_one_thing(folder, capsys):
    assert all(f"        {field.name}: " in str(lit_llm.Sampling.__doc__) for field in fields(lit_llm.Sampling))
    recipe = lit_llm.load_recipe("tiny.yaml", settings={"run_dir": "runs/a"})
    assert lit_llm.fit(recipe) == 0
    model = lit_llm.TrainedModel("runs/a", device="cpu")
    greedy = [model.generate("line", max_new_tokens=10, sampling=lit_llm.Sampling(temperature=0, seed=seed)) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    ids = model.tokenizer.encode("line")
    assert greedy[0].startswith("line" + model.tokenizer.decode([int(model(torch.tensor(ids)[None])[0, -1].argmax())]))
    Path("runs/a/tokenizer.json").unlink()
    with pytest.raises(UserError, match="Tokenizer not found at"):
        lit_llm.TrainedModel("runs/a", device="cpu")
