"""Faults that are planted into the library, each found by the check that should, and by the others not.

That checks which `make certify` requires pass without a fault is not repeated here.
"""

import warnings

import pytest
import torch
from certifying import outcome

from lit_llm.certify import watch
from lit_llm.certify.watch import WaitsWatch
from lit_llm.data import TextFiles
from lit_llm.models.block import Block
from lit_llm.training.language_model import LanguageModel

PLAIN = "losses/{}/32-true/eager/none/AdamW"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def passes(name: str, devices: int = 1) -> bool:
    found = outcome(name, devices)
    assert found.outcome in ("passed", "failed"), found
    return found.outcome == "passed"


@pytest.mark.slow
def test_a_graph_break_in_a_block(monkeypatch):
    forward = Block.forward

    def broken(self, x, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, x, *args, **kwargs)

    assert passes("graphs/ramp, validation, generation")
    monkeypatch.setattr(Block, "forward", broken)
    assert not passes("graphs/ramp, validation, generation")


@pytest.mark.parametrize("fault", ["bf16", "an eighth too large"])
def test_a_wrong_gradient(fault, monkeypatch):
    def spoil(self):
        for i, parameter in enumerate(self.parameters()):
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16() if fault == "bf16" else parameter.grad * (1 + i % 2 / 8))

    monkeypatch.setattr(LanguageModel, "on_after_backward", spoil)  # after each micro-batch, so sums are rounded, too
    found = _against_one_process(monkeypatch, devices=1)
    assert not found


def _against_one_process(monkeypatch, devices: int) -> bool:
    """The reference is computed without the fault: one process of `one process, …` has it removed."""
    from lit_llm.certify import training

    train, fault = training.train, LanguageModel.on_after_backward

    def alone(folder, *, strategy="none", **options):
        if strategy == "none":  # the reference names no strategy
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LanguageModel, "on_after_backward", lambda self: None)
                return train(folder, **options)
        return train(folder, strategy=strategy, **options)

    assert fault is LanguageModel.on_after_backward
    monkeypatch.setattr(training, "train", alone)
    return passes(PLAIN.format("one" if devices == 1 else "ddp"), devices)


def test_an_optimizer_state_that_is_not_restored(monkeypatch):
    assert passes("resume/one/whole")
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    assert not passes("resume/one/whole")


def test_a_position_in_the_data_that_is_not_restored(monkeypatch):
    restart = lambda self, state: vars(self).update(_base=(state["global_step"], 0))  # noqa: E731
    monkeypatch.setattr(TextFiles, "load_state_dict", restart)
    assert not passes("resume/one/asynchronous")


@pytest.mark.slow
def test_a_plan_of_memory_that_is_a_fifth_off(monkeypatch):
    def planned(settings, *, cuda, peak_memory=watch.peak_memory):
        return type("Planned", (), {"total": 0.8 * peak_memory(settings, cuda=cuda).total})

    monkeypatch.setattr(watch, "peak_memory", planned)
    assert outcome("plan/memory/one").figure == pytest.approx(0.2, abs=0.02)


def test_a_host_synchronisation_in_the_step(monkeypatch):
    """torch warns of one on CUDA only: here a step warns, while the mode is on, as torch does."""
    from lit_llm.certify import training

    mode = [0]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: mode.__setitem__(0, value))
    step = LanguageModel.training_step

    def waits(self, batch, batch_idx):
        if mode[0]:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)
        return step(self, batch, batch_idx)

    def found(tmp):
        tmp.mkdir()
        training.write_text(tmp)
        return training.train(tmp, ranks=1, steps=12, log_every=10, watch="waits")["waits"]

    from pathlib import Path

    assert WaitsWatch in watch.WATCHES.values() and found(Path("good")) == []
    monkeypatch.setattr(LanguageModel, "training_step", waits)
    # Each of 2 micro-batches of the steps 3 to 9, 11 and 12: not of those with a row, and not of the first two.
    assert len(found(Path("bad"))) == 2 * 9


@pytest.mark.slow
def test_a_reduction_that_leaves_a_rank_out(monkeypatch):
    backward = LanguageModel.backward

    def without(self, loss, *args, **kwargs):
        backward(self, loss * float(self.global_rank != 1), *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "backward", without)
    assert all(1e-5 < outcome(PLAIN.format(layout), 2).figure < 1 for layout in ("ddp", "fsdp2"))


@pytest.mark.slow
def test_a_plan_of_traffic_that_is_off(monkeypatch):
    real = watch.communicated_bytes
    monkeypatch.setattr(watch, "communicated_bytes", lambda *a, **k: {n: 1.2 * v for n, v in real(*a, **k).items()})
    assert outcome("plan/traffic/fsdp2", 2).figure == pytest.approx(0.2, abs=0.02)


@pytest.mark.slow
def test_a_state_that_another_layout_does_not_get(monkeypatch):
    assert passes("checkpoint/fsdp2/in/replicas", 2)
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    assert not passes("checkpoint/fsdp2/in/replicas", 2)
