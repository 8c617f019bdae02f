"""Optimizers × strategies: which combinations train, save, are killed and resume exactly, and that `fit` refuses the others."""

import json
import re
from pathlib import Path

import layouts
import optimizer_matrix
import pytest
import torch
from launch import run_ranks
from optimizer_matrix import LAYOUTS, OPTIMIZERS

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.config.optimizer_trial import optimizer_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy

PAGE = (Path(__file__).parents[2] / "docs/evidence/support-matrix.md").read_text()
NOWHERE = {"LBFGS", "SparseAdam"}
WHOLE_ONLY = {"Adafactor", "Rprop", "torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8"}
"""Refused on distributed parameters."""
ON_FOUR = ("MuonAdamW", "MuonAdamW, NorMuon", "Lion", "AdamW", "torch.optim.Muon")
ON_STAGES = (*ON_FOUR, "Adagrad")  # which makes its state before the first step


def status(optimizer: str, layout: str) -> str:
    """What docs/evidence/support-matrix.md says of a cell."""
    if optimizer in NOWHERE or (optimizer in WHOLE_ONLY and isinstance(LAYOUTS[layout][1], dict)):
        return "refused"
    few = ON_STAGES if layout == "pp" else ON_FOUR if LAYOUTS[layout][0] == 4 else OPTIMIZERS
    return "tested" if optimizer in few else "untested"


def make(optimizer: str):
    class_path, init_args = OPTIMIZERS[optimizer]
    return lambda groups: layouts.instantiate(class_path, groups, init_args)


def test_the_page_names_every_optimizer_with_the_layouts_that_train_it_and_those_that_refuse_it():
    table = PAGE.partition("## Optimizer × strategy")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    stated = {name: cells for names, *cells in rows[2:] for name in re.findall("`(.+?)`", names)}
    assert stated.keys() == OPTIMIZERS.keys() and sum(row[0].count("`") for row in rows) == 2 * len(OPTIMIZERS)
    for name, cells in stated.items():
        kinds = [[layout for layout in LAYOUTS if status(name, layout) == kind] for kind in ("tested", "refused")]
        assert cells == [", ".join(layouts) or "none" for layouts in kinds], name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_trial_step_refuses_exactly_what_does_not_work(optimizer):
    class_path = OPTIMIZERS[optimizer][0]
    for layout, (_, strategy) in LAYOUTS.items():
        found = optimizer_problems(
            MeshStrategy(**strategy) if isinstance(strategy, dict) else strategy, make(optimizer), class_path
        )
        assert len(found) == (status(optimizer, layout) == "refused"), (layout, found)
        for sentence in found:
            assert sentence.startswith(class_path.rpartition(".")[2]) and "(--optimizer AdamW" in sentence, sentence
    assert not torch.distributed.is_initialized()


def test_a_trial_step_does_not_draw_random_numbers():
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(3)

    torch.manual_seed(5)
    first = torch.rand(2)
    torch.manual_seed(5)
    assert optimizer_problems(MeshStrategy(shard=2), lambda groups: Noisy(groups, lr=1.0), "mine.Noisy") == []
    assert torch.equal(torch.rand(2), first)


def test_a_state_that_no_checkpoint_restores_is_refused():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["what"] = object()

    (found,) = optimizer_problems("auto", lambda groups: Odd(groups, lr=1.0), "mine.Odd")
    assert found == "Odd keeps its state in object, which a checkpoint cannot restore (--optimizer AdamW)"


def test_fit_refuses_before_anything_is_written(folder, capsys):
    for flags in (
        ["--optimizer", "SparseAdam"],
        ["--optimizer", "Rprop", "--config", "strategy/fsdp2", "--trainer.devices", "2"],
        ["--optimizer", "torchao.optim.AdamW8bit", "--config", "strategy/tp", "--trainer.devices", "2"],
    ):
        before = sorted(folder.rglob("*"))
        assert main(["fit", "--config", "tiny.yaml", *flags]) == 2
        err = capsys.readouterr().err.splitlines()
        assert [line for line in err if line.startswith("error: ")] and flags[1].rpartition(".")[2] in err[-1], err
        assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_fit_takes_torchs_muon_by_its_name_and_continues(folder, capsys):
    flags = ["--config", "tiny.yaml", "--optimizer", "torch.optim.Muon", "--optimizer.lr", "0.01", "--schedule", "null"]
    for run_dir, steps in (("straight", "6"), ("parts", "3"), ("parts", "6")):
        run = ["fit", *flags, "--run_dir", run_dir, "--resume", "auto", "--trainer.max_steps", steps]
        assert main(run) == 0, capsys.readouterr().err
    one, other = (read(f"{run}/checkpoints/last.ckpt") for run in ("straight", "parts"))
    assert one["optimizer_class"] == "lit_llm.optim.TorchMuon"
    kept = ("state_dict", "optimizer_states")
    assert optimizer_matrix.different({k: one[k] for k in kept}, {k: other[k] for k in kept}) == 0
    assert main(["plan", *flags]) == 0 and "torch.optim.Muon, state" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tested_cell_is_killed_and_resumes_exactly(layout, tmp_path, monkeypatch):
    """From a whole checkpoint or from shards: each optimizer from one of them, and on the next layout from the other."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its step, which takes longer than this test
    (tmp_path / "text.txt").write_text(layouts.TEXT)
    ranks, strategy = LAYOUTS[layout]
    ways = ["whole", "sharded"] if isinstance(strategy, dict) else ["whole"]
    names, first = [name for name in OPTIMIZERS if status(name, layout) == "tested"], list(LAYOUTS).index(layout)
    ways_of = {name: [ways[i % len(ways)]] for i, name in enumerate(names, first)}
    for each in run_ranks(Path(optimizer_matrix.__file__), ranks, tmp_path, layout, json.dumps(ways_of), timeout=800):
        assert each == {name: dict.fromkeys(ways, "exact") for name, ways in ways_of.items()}
