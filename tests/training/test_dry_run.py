"""Memory that is counted without data, and the parts of a dry run that need no process of their own."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lit_llm.config import dry_run
from lit_llm.config.arguments import read
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.traffic import Collectives
from lit_llm.training.dry_run import Counted, short_steps
from lit_llm.training.live_memory import LiveMemory
from lit_llm.training.sizes_only import without_data

KB = 1024


def test_live_memory_counts_what_autograd_keeps_and_the_kinds_at_the_peak():
    resize = torch.UntypedStorage.resize_
    with without_data(), LiveMemory() as memory:
        weight = torch.empty(KB, requires_grad=True)  # 4 kB
        memory.name([weight], "weights")
        memory.restart()
        y = weight * 2  # 4 kB; `exp` keeps its result, so y can go
        y = y.exp()
        loss = y.sum()  # 4 bytes
        assert memory.at_peak() == {"weights": 4 * KB, "activations and work": 8 * KB} and memory.total == 8 * KB + 4
        loss.backward()  # at most: y, the gradient of exp, that of the product and weight.grad, which is one of them
        del y, loss
        assert memory.total == 8 * KB
        memory.restart()
        memory.name([weight.grad], "gradients")
        assert memory.at_peak() == {"weights": 4 * KB, "gradients": 4 * KB}
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(2 * KB)
        assert memory.at_peak() == {"gathered weights": 4 * KB, "gradients": 4 * KB} and memory.total == 6 * KB
    assert torch.UntypedStorage.resize_ is resize, "what was replaced is restored"


def test_recomputation_keeps_less():
    def peak(layers):
        with without_data(), LiveMemory() as memory:
            x = torch.empty(KB, requires_grad=True)
            layers(x).sum().backward()
            return sum(memory.at_peak().values())

    def three(x):
        return x.exp().exp().exp()

    # x, the three results that exp keeps, one gradient; the sum and its gradient
    assert peak(three) == 5 * 4 * KB + 8

    def recomputed(x):
        return checkpoint(three, x, use_reentrant=False)

    assert peak(lambda x: recomputed(recomputed(x))) < peak(lambda x: three(three(x))) == 8 * 4 * KB + 8


def test_integers_have_data_and_floats_have_none():
    with without_data():
        ids = torch.arange(6).view(2, 3)
        embedded = torch.empty(6, 4)[ids]
        assert (ids % 2).sum().item() == 3 and ids.float().mean().item() == 2.5
        assert embedded.shape == (2, 3, 4) and embedded.mean().item() == 1.0  # an unknown number
        assert torch.empty(3, device="meta").device.type == "meta"


def test_a_step_is_extended_by_what_each_further_micro_batch_adds():
    def step(calls, memory):
        row = Collectives("shard", "all_gather", 8, calls, 100 * calls, 87.5 * calls)
        norm = Collectives("world", "all_reduce", 8, 1, 4, 7.0)
        return Counted({"weights": 10, "activations and work": memory}, {row[:3]: row, norm[:3]: norm})

    assert step(3, 20).extended(step(5, 21), 4, memory_grows=True) == step(11, 24)
    assert step(3, 20).extended(step(5, 21), 4, memory_grows=False) == step(11, 21)


def test_a_short_step_fills_the_pipeline():
    assert [short_steps(PipelineLayout(1), count) for count in (1, 3, 4, 999)] == [[1], [3], [2, 3], [2, 3]]
    assert short_steps(PipelineLayout(8), 256) == [8, 9] and short_steps(PipelineLayout(8, "gpipe"), 256) == [2, 3]
    assert short_steps(PipelineLayout(4, "interleaved1f1b"), 32) == [8, 12]
    assert short_steps(PipelineLayout(4, "interleaved1f1b"), 30) == [30], "not a multiple of the period"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "--json belongs to a dry run: add --dry_run, or remove it"),
        (["--dry_run", "--dry_run_rank", "-1"], "dry_run_rank is -1, but must be"),
        (["--dry_run", "--dry_run_rank", "16", "--trainer.devices", "16"], "dry_run_rank is 16, but the run has 16 processes"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(words, message, tmp_path, monkeypatch, capsys):
    from lit_llm.__main__ import main

    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "gpt2-124m", "--config", "strategy/fsdp2", "--data.micro_batch_size", "4", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_reports_everything_that_the_launch_would_refuse(tmp_path, monkeypatch, capsys):
    from lit_llm.__main__ import main

    monkeypatch.chdir(tmp_path)
    shape = ["--trainer.num_nodes", "2", "--trainer.devices", "5", "--trainer.strategy.tensor_parallel", "5"]
    words = ["fit", "--config", "gpt2-124m", "--config", "strategy/tp", *shape, "--model.dropout", "2"]
    assert main([*words, "--dry_run"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) > 1 and all(line.startswith("error: ") for line in errors)
    assert any("model.dropout is 2" in line for line in errors)


def test_a_dry_run_says_at_once_which_ranks_it_runs_and_when_each_has_ended(tmp_path, monkeypatch, capsys):
    class Pool:
        def submit(self, run, arguments, rank):
            return SimpleNamespace(result=lambda: SimpleNamespace(seconds=rank + 0.25, counted=[2]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "ProcessPoolExecutor", lambda *_, **__: contextlib.nullcontext(Pool()))
    shape = ["--trainer.num_nodes", "2", "--trainer.strategy.pipeline", "4", "--data.micro_batch_size", "4"]
    words = ["--config", "gpt2-124m", "--config", "strategy/fsdp2-pp", "--trainer.devices", "8", *shape]
    dry_run.rehearse(read(words), None)
    first, *ends = capsys.readouterr().err.splitlines()
    assert first == "note: dry run of ranks 0, 8, 12 of 16 processes: this takes seconds to minutes"
    assert sorted(ends) == [f"note: rank {rank} has ended after {rank}.2 s" for rank in (0, 12, 8)]
