"""Planned memory and traffic of MuonAdamW's owners against steps of each rank of a fake process group."""

import math
from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_step import highest

from lit_llm.distributed.traffic import Traffic
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import MuonAdamW, parameter_groups
from lit_llm.plan import find
from lit_llm.plan.collectives import muon_collectives
from lit_llm.plan.optimizer import MuonWork, Optimizer, row_state_bytes, state_bytes
from lit_llm.plan.weights import weights_of

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32)
BLOCK = [(128, 128)] * 4 + [(512, 128), (128, 512)]
MESHES = {  # shape of the mesh, placements, sizes of the dimensions that split, replicas
    "one process": ((), [], (), 1),
    "fsdp": ((4,), [Shard(0)], (4,), 1),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (2,), 2),
    "replicas": ((4, 1), [Replicate(), Shard(0)], (1,), 4),
    "fsdp and tensor parallel": ((2, 2), [Shard(0), Shard(1)], (2, 2), 1),
}


def step(shapes, mesh, placements, **options):
    """(peak bytes of a step, bytes sent by collective) of this rank."""
    weights = [torch.zeros(shape) for shape in shapes]
    if mesh is not None:
        weights = [distribute_tensor(weight, mesh, placements, src_data_rank=None) for weight in weights]
    parameters = [nn.Parameter(weight) for weight in weights]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = MuonAdamW(parameters, **options)
    with Traffic() as traffic:
        optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        optimizer.step()
    return highest(log), {row.kind: row.sent for row in traffic.rows()}


@pytest.mark.parametrize(
    ("options", "width"),
    [({"ns_dtype": "float32"}, 4), ({"ns_dtype": "bfloat16"}, 2), ({"ns_dtype": "float32", "normuon_beta2": 0.9}, 4)],
    ids=["float32", "bfloat16", "normuon"],
)
@pytest.mark.parametrize("name", MESHES)
def test_memory_and_bytes_are_those_of_a_step(name, options, width):
    sizes, placements, dimensions, rows = MESHES[name]
    shapes, peaks, sent = tuple(BLOCK * 3), [], []
    ranks = math.prod(sizes)
    for rank in range(ranks):
        mesh = None
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            # Unique names, because torch keeps what it derived for a mesh of the same names and an earlier process group.
            names = [f"{name}-{options}-{rank}-{d}" for d in range(len(sizes))]
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        try:
            peak, bytes_of = step(shapes, mesh, placements, **options)
        finally:
            if ranks > 1:
                dist.destroy_process_group()
        peaks.append(peak)
        sent.append(bytes_of)
    work = MuonWork(tuple(shapes), dimensions=dimensions, rows=rows, normuon="normuon_beta2" in options)
    assert work.work_bytes(4, width, cuda=False) / max(peaks) == pytest.approx(1, abs=0.01 if width == 4 else 0.05)
    traffic = Counter[str]()
    for each in muon_collectives(work, 4, width):
        traffic[each.kind] += each.sent(1)
    counted = {kind: pytest.approx(mean(each[kind] for each in sent)) for kind in sent[0]}
    assert {kind: size for kind, size in traffic.items() if size} == counted


def test_the_row_numbers_of_normuon_take_an_all_reduce_of_time():
    """On four ranks of a node and two nodes: a ring of 4 over the matrix's shards, one of 2 over its replicas."""
    links = replace(find("h100-sxm"), node_gbps=100.0, network_gbps=10.0, devices_per_node=4)
    plain, rows = (
        sum(each.seconds(links) for each in muon_collectives(MuonWork(tuple(BLOCK), (), (4,), 2, normuon=normuon), 4, 2))
        for normuon in (False, True)
    )
    size = 4 * (5 * 128 + 512)  # fp32 numbers of the rows of a block's matrices
    inside, between = 2 * 3 / 4 * size / 100e9 + 2 * 3 * 10e-6, size / 10e9 + 2 * 10e-6
    assert rows - plain == pytest.approx(inside + between)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("normuon_beta2", [None, 0.9])
def test_state_has_the_planned_bytes(normuon_beta2, dtype, width):
    model = GPT(TINY).to(dtype)
    optimizer = MuonAdamW(parameter_groups(model), normuon_beta2=normuon_beta2)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    planned, weights = Optimizer("MuonAdamW", normuon=normuon_beta2 is not None), weights_of(TINY)
    assert sum(s.nbytes for s in states) == state_bytes(planned, weights, width) + row_state_bytes(planned, weights, width)
