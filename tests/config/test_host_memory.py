"""What the plan of a run decides before training: a refusal, and what FSDP2 keeps whole. It never ends a run by failing."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipe_runs import RECIPE, TEXT, run
from torch import nn

from lit_llm.config.objects import RunObjects
from lit_llm.core import memory
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.plan import find, host_memory, plan_monitor
from lit_llm.plan.host_memory import memory_problem


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("tiny.yaml").write_text(RECIPE)


def test_a_planner_that_fails_is_a_warning_with_the_reason_and_the_run_goes_on(capsys, monkeypatch):
    def fails(*_, **__):
        raise ZeroDivisionError("of the planner")

    monkeypatch.setattr(host_memory, "peaks_of_ranks", fails)
    monkeypatch.setattr(plan_monitor, "step_times", fails)
    with pytest.warns(UserWarning, match="ZeroDivisionError: of the planner") as said:
        code, out, _ = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "run")
    assert code == 0 and "training ended after step 8" in out and not Path("run/plan.json").exists()
    assert len([each for each in said if "of the planner" in str(each.message)]) == 2


class Convolution(nn.Module):
    """Its weight has three dimensions."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=2)

    def forward(self, input_ids):
        x = self.embedding(input_ids).mT
        return self.mix(x)[..., : x.size(2)].mT @ self.embedding.weight.T


def test_a_module_with_convolutions_is_planned_and_trained_with_the_default_optimizer(capsys):
    Path("own.yaml").write_text(re.sub("model: {.*}", "model: {block_size: 16}", RECIPE))
    flags = ["--config", "own.yaml", "--architecture", "test_host_memory.Convolution"]
    code, _, err = run(capsys, "plan", *flags)
    assert code == 0, err
    code, _, err = run(capsys, "fit", *flags, "--run_dir", "run")
    assert code == 0 and Path("run/plan.json").exists(), err


def refused(capsys, *flags: str) -> float:
    """GB of a step, of a fit that is refused because of it."""
    mesh = {"pipeline": "2", "shard": "1"}
    words = [word for name, value in mesh.items() for word in (f"--trainer.strategy.{name}", value)]
    layout = ["--trainer.strategy", "MeshStrategy", *words, "--trainer.devices", "2", "--model.n_layer", "8"]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *layout, "--data.micro_batch_size", "64", *flags)
    assert code == 2 and err.count("\n") == 1
    return float(re.search(r"a training step takes about ([\d.]+) GB in 2 processes", err)[1])


@pytest.mark.slow
def test_a_pipeline_is_planned_with_all_micro_batches_of_a_step(capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "PROCESS_BYTES", 0)
    monkeypatch.setattr(host_memory, "memory_bytes", lambda device: 1e8)
    monkeypatch.setattr(host_memory, "TOLERANCE", 0.0)
    model = ["--model.n_embd", "256", "--model.block_size", "64"]
    gpipe = [*model, "--trainer.strategy.schedule", "gpipe", "--data.global_batch_size"]
    four, eight, twelve = (refused(capsys, *gpipe, str(64 * n)) for n in (4, 8, 12))
    assert twelve - eight == pytest.approx(eight - four, abs=0.11) and eight > 1.7 * four  # each stores its activations
    folded = refused(capsys, *model, "--trainer.strategy.schedule", "dualpipev", "--data.global_batch_size", "512")
    assert 0 < folded < eight  # no activations of all micro-batches


@pytest.mark.parametrize(("gigabytes", "keeps"), [(80, True), (3.4, False)])
def test_on_a_gpu_fit_keeps_whole_weights_in_a_pipeline_only_if_the_run_fits(monkeypatch, gigabytes, keeps):
    """8 layers of 12·1024² fp32 parameters take 0.4 GB whole, and the rest 2.2 GB. The driver has 1 GB."""
    flags = {"n_layer": 16, "n_head": 8, "n_embd": 1024, "block_size": 1024, "vocab_size": 2048}
    strategy = MeshStrategy(pipeline=2)
    strategy.parallel_devices = [torch.device("cuda", 0)]
    monkeypatch.setattr(host_memory, "this_machine", lambda **_: replace(find("h100-sxm"), memory_gb=gigabytes))
    monkeypatch.setattr(host_memory, "memory_bytes", lambda device: gigabytes * 1e9)
    trainer = SimpleNamespace(strategy=strategy, num_devices=8, max_steps=8)
    data = SimpleNamespace(global_batch_size=32, micro_batch_size=1, vocab_size=2048)
    parts = {"model": GPTConfig(**flags), "data": data, "loss": LossConfig(), "compute": ComputeConfig()}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    config = SimpleNamespace(trainer=SimpleNamespace(precision="32-true"))
    spec = SimpleNamespace(config=config, scratch=False, model=parts["model"])
    assert (
        memory_problem(RunObjects(spec, parts, None, None, optimizer, trainer, strategy, layout_of(strategy, 16, 8), ()))
        is None
    )
    assert strategy.chosen == (keeps, True)


def test_a_limit_of_the_address_space_is_named_before_anything_is_built(capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "address_space_bytes", lambda: 10**8)
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "run")
    assert code == 2 and "ulimit -v" in err and "0.1 GB" in err and not Path("run").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_every_control_group_above_the_process_counts(version, tmp_path, monkeypatch):
    top, name = (tmp_path / "memory", "memory.limit_in_bytes") if version == 1 else (tmp_path, "memory.max")
    (top / "a/b").mkdir(parents=True)
    for folder, limit in ((top, "max"), (top / "a", "5000"), (top / "a/b", "7000")):
        (folder / name).write_text(f"{limit}\n")
    (tmp_path / "of-process").write_text("0::/a/b\n" if version == 2 else "7:cpu:/x\n6:memory:/a/b\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS_OF_PROCESS", tmp_path / "of-process")
    assert memory.cgroup_limits() == [(top / "a/b", 7000), (top / "a", 5000)]
    assert memory.memory_bytes(torch.device("cpu")) == 5000
    (top / "a/memory.current").write_text("1000\n")
    (top / "a/memory.stat").write_text("anon 900\ninactive_file 300\n")
    assert memory.free_host_bytes() == 5000 - 1000 + 300
