"""Planned memory and traffic of MuonAdamW's owners against steps of each rank of a fake process group."""

import math
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.distributed.traffic import Traffic
from lit_llm.optim import MuonAdamW
from lit_llm.plan import muon
from lit_llm.training.calibration import highest

BLOCK = [(128, 128)] * 4 + [(512, 128), (128, 512)]
MESHES = {  # shape of the mesh, placements, sizes of the dimensions that split, replicas
    "one process": ((), [], (), 1),
    "fsdp": ((4,), [Shard(0)], (4,), 1),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (2,), 2),
    "replicas": ((4, 1), [Replicate(), Shard(0)], (1,), 4),
    "fsdp and tensor parallel": ((2, 2), [Shard(0), Shard(1)], (2, 2), 1),
}


def step(shapes, mesh, placements, ns_dtype):
    """(peak bytes of a step, bytes sent by collective) of this rank."""
    weights = [torch.zeros(shape) for shape in shapes]
    if mesh is not None:
        weights = [distribute_tensor(weight, mesh, placements, src_data_rank=None) for weight in weights]
    parameters = [nn.Parameter(weight) for weight in weights]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = MuonAdamW(parameters, ns_dtype=ns_dtype)
    with Traffic() as traffic:
        optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        optimizer.step()
    return highest(log), {row.kind: row.sent for row in traffic.rows()}


@pytest.mark.parametrize(("ns_dtype", "width"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("name", MESHES)
def test_memory_and_bytes_are_those_of_a_step(name, ns_dtype, width):
    sizes, placements, dimensions, rows = MESHES[name]
    shapes, peaks, sent = tuple(BLOCK * 3), [], []
    ranks = math.prod(sizes)
    for rank in range(ranks):
        mesh = None
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            # Unique names, because torch keeps what it derived for a mesh of the same names and an earlier process group.
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=[f"{name}-{width}-{rank}-{d}" for d in range(len(sizes))])
        try:
            peak, bytes_of = step(shapes, mesh, placements, ns_dtype)
        finally:
            if ranks > 1:
                dist.destroy_process_group()
        peaks.append(peak)
        sent.append(bytes_of)
    planned = muon.work_bytes(shapes, 4, width, shards=ranks // rows, rows=rows, cuda=False)
    assert planned / max(peaks) == pytest.approx(1, abs=0.01 if width == 4 else 0.05)
    traffic = muon.traffic_bytes(shapes, width, dimensions=dimensions, rows=rows)
    assert traffic == {kind: pytest.approx(mean(each[kind] for each in sent)) for kind in sent[0]}
