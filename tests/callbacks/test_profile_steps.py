"""Profile: the content of its file, and runs without one. Several processes: test_time_ranks.py."""

import gzip
import json
import re

import pytest
import torch
from foreign import Foreign, fit, make_trainer

from lit_llm.callbacks import Profile, StepCheckpoint


def trace(path):
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def by_step(events):
    """{optimizer step: names of the operators within its label}."""
    labels = {}
    for event in events:
        if match := re.fullmatch(r"ProfilerStep#(\d+)", event["name"]):
            labels.setdefault(int(match[1]), event)
    return {
        step: [e["name"] for e in events if label["ts"] <= e["ts"] and e["ts"] + e["dur"] <= label["ts"] + label["dur"]]
        for step, label in labels.items()
    }


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_chosen_steps_and_no_others_are_in_the_trace_each_with_all_its_work(tmp_path):
    fit([Profile(wait=3, steps=2)], tmp_path, accumulate_grad_batches=2)
    assert files(tmp_path / "profile") == ["rank0.4.pt.trace.json.gz"]
    steps = by_step(trace(tmp_path / "profile" / "rank0.4.pt.trace.json.gz"))
    assert set(steps) == {4, 5}
    for names in steps.values():
        assert names.count("aten::randint") == 2  # each micro-batch is made with one such operator
        assert names.count("aten::embedding") == names.count("aten::embedding_dense_backward") == 2
        assert names.count("autograd::engine::evaluate_function: NllLossBackward0") == 2
        assert len([name for name in names if name.startswith("Optimizer.step#Adam")]) == 1


def test_the_file_is_one_that_tensorboards_plugin_looks_for(tmp_path):
    fit([Profile(wait=0, steps=1, dirpath=str(tmp_path / "own"))], tmp_path)
    (name,) = files(tmp_path / "own")
    # torch_tb_profiler/consts.py: worker name, number of the span
    assert re.match(r"^(.*?)(?:\.(\d+))?\.pt\.trace\.json(?:\.gz)?$", name).groups() == ("rank0", "1")
    assert set(by_step(trace(tmp_path / "own" / name))) == {1}


def test_a_resumed_run_counts_on_and_the_losses_are_those_without(tmp_path):
    _, whole, _ = fit([StepCheckpoint(3, keep_last=9, monitor=None)], tmp_path)
    path = tmp_path / "checkpoints" / "step-00000003.ckpt"
    _, module, _ = fit([Profile(wait=1, steps=2)], tmp_path, resume=path)
    assert module.seen == whole.seen[3:]
    assert set(by_step(trace(tmp_path / "profile" / "rank0.5.pt.trace.json.gz"))) == {5, 6}


def test_a_run_that_ends_early_writes_what_there_is_or_says_that_there_is_nothing(tmp_path):
    fit([Profile(wait=6, steps=10)], tmp_path)
    assert set(by_step(trace(tmp_path / "profile" / "rank0.7.pt.trace.json.gz"))) == {7, 8}
    with pytest.warns(UserWarning, match=r"the run ended after step 8, before step 9 \(Profile\(wait\)\)"):
        fit([Profile(wait=8, dirpath=str(tmp_path / "none"))], tmp_path)
    assert not (tmp_path / "none").exists()


def test_a_run_that_breaks_leaves_neither_a_file_nor_a_profiler(tmp_path):
    class Broken(Foreign):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                assert torch.autograd._profiler_enabled()
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken"):
        fit([Profile(wait=2)], tmp_path, module=Broken())
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "profile").exists()


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"this run uses cpu: remove Profile\(memory_snapshot\)"):
        fit([Profile(memory_snapshot=True)], tmp_path)
    trainer = make_trainer([], tmp_path, profiler="pytorch")
    assert "remove Trainer(profiler)" in Profile().trainer_problems(trainer)[0]
