"""Memory that is counted without data, and the parts of a dry run that need no process of their own."""

import torch
from dry_run import Counted, short_steps
from live_memory import LiveMemory
from sizes_only import without_data
from torch.utils.checkpoint import checkpoint

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.traffic import Collectives

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
