"""The counter of collectives, against bytes worked out by hand. Rank 0 of four: a fake process group runs its calls alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.distributed.fsdp import apply_fsdp
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.mesh_strategy import set_last_micro_batch
from lit_llm.distributed.traffic import Traffic
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.plan.collectives import Collective, fsdp_collectives


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor_parallel"))
    dist.destroy_process_group()


def test_every_interface_to_collectives_is_counted_with_its_bytes(mesh):
    tensors = mesh.get_group("tensor_parallel")
    x, whole = torch.ones(6), torch.zeros(12)  # 24 and 48 bytes
    linear = fully_shard(torch.nn.Linear(16, 8, bias=False), mesh=mesh["shard"])  # 512 bytes
    matrix = distribute_tensor(torch.ones(4, 4), mesh["tensor_parallel"], [Shard(0)])  # 64 bytes

    def counted(step):
        with Traffic(mesh) as traffic:
            step()
        assert traffic.sent() == sum(row.sent for row in traffic.rows())
        return [tuple(row) for row in traffic.rows()]

    gather = ("tensor_parallel", "all_gather", 2, 1, 48, 24.0)
    scatter = ("tensor_parallel", "reduce_scatter", 2, 1, 48, 24.0)
    assert counted(lambda: dist.all_reduce(x)) == [("world", "all_reduce", 4, 1, 24, 36.0)]  # 2 · 3/4 · 24
    assert counted(lambda: dist.all_gather([torch.empty(6), torch.empty(6)], x, group=tensors)) == [gather]
    assert counted(lambda: dist.all_gather_into_tensor(whole, x, group=tensors)) == [gather]
    assert counted(lambda: dist.reduce_scatter_tensor(x, whole, group=tensors)) == [scatter]
    assert counted(lambda: dist.reduce_scatter(x, [x, x], group=tensors)) == [scatter]
    assert counted(lambda: dist.all_to_all_single(torch.empty(12), whole, group=tensors)) == [
        ("tensor_parallel", "all_to_all", 2, 1, 48, 24.0)
    ]
    assert counted(lambda: dist.broadcast(x, 0)) == [("world", "broadcast", 4, 1, 24, 24.0)]
    assert counted(lambda: dist.send(x, 1)) == [("world", "send", 4, 1, 24, 24.0)]
    assert counted(lambda: dist.recv(x, 1)) == [("world", "receive", 4, 1, 24, 0.0)]
    assert counted(lambda: functional.all_gather_tensor(x, 0, tensors).sum()) == [gather]
    assert counted(lambda: functional.reduce_scatter_tensor(whole, "sum", 0, tensors).sum()) == [scatter]
    assert counted(lambda: functional.all_reduce(x, "sum", tensors).sum()) == [
        ("tensor_parallel", "all_reduce", 2, 1, 24, 24.0)  # 2 · 1/2 · 24
    ]
    assert counted(lambda: matrix.redistribute(placements=[Replicate()])) == [("tensor_parallel", "all_gather", 2, 1, 64, 32.0)]
    # The root's weights stay gathered until backward: one gather, and one reduce-scatter of as many fp32 gradients.
    assert counted(lambda: linear(torch.ones(2, 16)).sum().backward()) == [
        ("shard", "all_gather", 2, 1, 512, 256.0),
        ("shard", "reduce_scatter", 2, 1, 512, 256.0),
    ]
    assert counted(lambda: x.sum()) == []


@pytest.mark.parametrize("kept", [KeptWhole(weights, gradients) for weights in (False, True) for gradients in (False, True)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp2_sends_the_bytes_of_the_plans_formula(mesh, kept, dtype, tied):
    """Three micro-batches on 2 replicas × 2 shards. Sizes divide, so that no shard is padded."""
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=64, tie_embeddings=tied, bias=True)
    model = GPT(config)
    numel = {name: p.numel() for name, p in model.named_parameters()}
    # Under autocast all but embedding and norms are gathered in bf16; a tied head is the embedding.
    width = {name: 4 if dtype is None or "embedding" in name or "norm" in name else 2 for name in numel}
    blocks, others = (
        sum(numel[name] * width[name] for name in numel if name.startswith("blocks.") == within) for within in (True, False)
    )
    gradients = 4 * sum(numel.values())
    strategy = SimpleNamespace(
        shard_mesh=mesh, cpu_offload=False, root_device=torch.device("cpu"), autocast_dtype=dtype, prefetch=1, kept=kept
    )
    apply_fsdp(model, strategy)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with Traffic(mesh) as traffic:
        for last in (False, False, True):
            set_last_micro_batch(model, kept, last)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = model(ids, ids).loss
            loss.backward()
    # The fake mesh's second dimension shards.
    sharding = fsdp_collectives(blocks, others, gradients, 2, stride=1, kept=kept)
    assert traffic.sent("tensor_parallel") == pytest.approx(sum(each.sent(3) for each in sharding), rel=1e-9)
    # Replicas add their shards of the gradients once a step, whatever is kept.
    assert traffic.sent("shard") == pytest.approx(Collective("", "all_reduce", gradients / 2).sent(3), rel=1e-9)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
